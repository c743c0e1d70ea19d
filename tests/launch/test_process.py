"""Processes are started, watched and stopped with their whole families; nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvberth.launch import LaunchError, ManagedProcess, PortLease

FAKE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def port() -> Iterator[int]:
    with PortLease() as lease:
        yield lease.take()


@pytest.fixture
def make(port: int, tmp_path: Path) -> Iterator[Callable[..., ManagedProcess]]:
    made: list[ManagedProcess] = []

    def build(*how: str) -> ManagedProcess:
        command = [sys.executable, str(FAKE), str(port), *how]
        process = ManagedProcess("fake-0", command, os.environ, tmp_path / "fake-0.log", f"http://127.0.0.1:{port}")
        made.append(process)
        process.start()
        return process

    yield build
    for process in made:
        process.finish_stop()


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def whole_family(process: ManagedProcess) -> list[psutil.Process]:
    """Once the engine, its child and its grandchild are there."""
    wait_until(process.is_ready, "it is ready")
    wait_until(lambda: len(process.family) == 3, "its family is there")
    return process.family


def are_gone(family: list[psutil.Process]) -> bool:
    return not any(is_there(each) for each in family)


def is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_process_becomes_ready_and_stops_with_its_family(make):
    """Children in sessions of their own end too."""
    process = make()
    family = whole_family(process)
    assert process.is_alive
    assert process.pid == family[0].pid
    process.finish_stop()
    assert not process.is_alive
    assert are_gone(family)
    assert process.family == []


def test_death_at_start_is_told_with_the_log(make):
    """The user sees the engine's own last words."""
    process = make("--die")
    wait_until(lambda: not process.is_alive, "it has died")
    with pytest.raises(LaunchError, match=r"fake-0 ended with status 3(.|\n)*no such model"):
        process.check()


def test_killed_process_takes_its_family_along(make):
    """As in a drill: nothing is left that could hold a port or memory."""
    process = make()
    family = whole_family(process)
    process.kill()
    assert are_gone(family)
    assert not process.is_alive


def test_engine_that_dies_alone_is_followed_by_its_children(make):
    """The API server is killed, its workers are not: the guard ends them."""
    process = make()
    family = whole_family(process)
    family[0].kill()
    wait_until(lambda: are_gone(family) and not process.is_alive, "its family has ended")
    with pytest.raises(LaunchError, match="status 137"):
        process.check()


def test_deaf_process_is_not_ready(make):
    """It lives, but does not answer."""
    process = make("--deaf")
    wait_until(lambda: "fake engine" in process.tail(), "it has begun")
    assert not process.is_ready()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_dead_launcher_leaves_no_orphans(port, tmp_path, number):
    """However the launching process dies."""
    script = f"""
        import os, sys, time
        from pathlib import Path
        from kvberth.launch import ManagedProcess
        command = [sys.executable, {str(FAKE)!r}, {str(port)!r}]
        process = ManagedProcess("fake-0", command, os.environ, Path({str(tmp_path / "log")!r}), "http://127.0.0.1:{port}")
        process.start()
        while not (process.is_ready() and len(process.family) == 3):
            time.sleep(0.02)
        print(*(each.pid for each in process.family), flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        family = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(family) == 3
        launcher.send_signal(number)
    wait_until(lambda: are_gone(family), "no orphan is left")


def test_leased_ports_are_not_given_twice():
    """Two clusters on one machine do not collide, even before anything has bound a port."""
    with PortLease() as one, PortLease() as two:
        first = {one.take(8) for _ in range(20)}
        second = {two.take() for _ in range(200)}
    taken = {port for start in first for port in range(start, start + 8)}
    assert len(taken) == 160
    assert not taken & second
