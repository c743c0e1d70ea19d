"""Probes of the machine, each on machines that are well and on some that are not."""

import resource
import socket
from pathlib import Path

import pytest

from kvberth.cli.doctor import Status, machine

GIB = 2**30


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 14, 2), "ok"), ((3, 15, 0), "warn")]
)
def test_python(version, status):
    """Too old fails; too new for vLLM still runs the router."""
    assert machine.probe_python(version).status == status


@pytest.mark.parametrize(("platform", "status"), [("linux", "ok"), ("darwin", "fail")])
def test_platform(platform, status):
    """Linux only."""
    assert machine.probe_platform(platform).status == status


@pytest.mark.parametrize(("available", "status"), [(16 * GIB, "ok"), (2 * GIB, "warn")])
def test_memory(available, status):
    """Little memory is a warning, since the need depends on the model."""
    check = machine.probe_memory(available)
    assert (check.status, check.found) == (status, f"{available // GIB}.0 GiB available")


@pytest.mark.parametrize(("free", "status"), [(4 * GIB, "ok"), (64 * 2**20, "warn")])
def test_shared_memory(tmp_path, free, status):
    """What Docker gives without being asked is too little."""
    assert machine.probe_shared_memory(tmp_path, free).status == status


def test_no_shared_memory():
    """Without /dev/shm nothing runs."""
    assert machine.probe_shared_memory(Path("/no/such/folder")).status is Status.FAIL


@pytest.mark.parametrize(("limit", "status"), [(1024, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(limit, status):
    """The usual 1024 is too few for a busy router."""
    assert machine.probe_open_files(limit).status == status


def test_port():
    """A taken port is a warning with the way to take another, a free one is ok."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = machine.probe_port("router port", port, "choose another")
    assert (taken.status, taken.found, taken.advice) == (
        Status.WARN,
        f"{port}: Address already in use",
        "choose another",
    )
    assert machine.probe_port("router port", port, "choose another").status is Status.OK


@pytest.mark.parametrize(
    "probe",
    [
        machine.probe_python,
        machine.probe_platform,
        machine.probe_memory,
        machine.probe_shared_memory,
        machine.probe_open_files,
    ],
)
def test_this_machine_has_a_row_for_each(probe):
    """Without arguments they look at the machine itself; whatever is not ok comes with advice."""
    check = probe()
    assert check.found
    assert (check.advice is None) == (check.status is Status.OK)
