"""Each fault says what it has touched, and that it was nothing if it was nothing."""

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from kvberth.drills.client_faults import FillMemory, Garbage, Leave, Stall
from kvberth.drills.faults import ClockJumps, DiskFull, Flap, Kill, Meddle, Pause, Rules, TransferErrors
from kvberth.drills.states import MemoryPressure
from kvberth.drills.wire import paths
from kvberth.drills.zmtp import Meddling


class FakeCluster:
    """Counts what a cluster counts; `hits` are added with each change while a fault is on."""

    def __init__(self, hits: int) -> None:
        self.hits, self.total, self.is_on = hits, 40, False

    def set_rules(self, *rules: object) -> int:
        return self._change(bool(rules))

    def meddle(self, meddling: Meddling) -> int:
        return self._change(meddling != Meddling())

    def fail_transfers(self, name: str, *, post: float, transfer: float) -> None:
        self._change(post > 0 or transfer > 0)

    def failed_transfers(self, name: str) -> int:
        return self.total

    def router_metric(self, name: str) -> float:
        self.total += self.hits if self.is_on else 0
        self.is_on = True
        return self.total

    def _change(self, is_on: bool) -> int:
        self.total += self.hits if self.is_on else 0
        self.is_on = is_on
        return self.total


CUT = paths(("a",), ("b",), loss=1.0)


@pytest.mark.parametrize("hits", [0, 7])
@pytest.mark.parametrize(
    "fault",
    [
        lambda: Rules(CUT),
        lambda: Meddle(Meddling(drop=0.5)),
        lambda: TransferErrors(("a",), post=0.5),
        Leave,
    ],
    ids=["rules", "meddle", "transfers", "leave"],
)
def test_what_was_hit_is_counted_from_the_beginning(fault, hits):
    """What earlier drills have hit is not this one's."""
    made, cluster = fault(), FakeCluster(hits)
    made.begin(cluster)
    made.end(cluster)
    assert made.felt == hits


def test_flapping_counts_all_its_times():
    """Each time is a fault of its own."""
    changes = threading.Semaphore(0)

    class Cluster(FakeCluster):
        def _change(self, is_on: bool) -> int:
            changes.release()
            return super()._change(is_on)

    fault = Flap(CUT, on_seconds=0.01, off_seconds=0.01)
    cluster = Cluster(1)
    fault.begin(cluster)
    for _ in range(6):
        assert changes.acquire(timeout=10)
    fault.end(cluster)
    assert fault.felt >= 2


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield psutil.Process(started.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(started.pid).resume()
        started.kill()


class Processes:
    """A cluster of one process; `obeys` is whether signals reach it."""

    def __init__(self, process: psutil.Process, obeys: bool) -> None:
        self.process, self.obeys = process, obeys

    def family(self, name: str) -> list[psutil.Process]:
        return [self.process]

    def signal(self, name: str, number: signal.Signals) -> None:
        if self.obeys:
            self.process.send_signal(number)

    def await_end(self, name: str) -> None:
        if self.obeys:
            self.process.wait(10)

    def start(self, name: str) -> None:
        pass


@pytest.mark.parametrize("obeys", [False, True])
def test_killed_processes_are_gone(process, obeys):
    """Or the drill has killed nobody."""
    fault = Kill(("one",))
    fault.begin(Processes(process, obeys))
    assert fault.felt == obeys


@pytest.mark.parametrize("obeys", [False, True])
def test_stopped_processes_are_stopped(process, obeys):
    """Until the fault ends."""
    fault, cluster = Pause(("one",)), Processes(process, obeys)
    fault.begin(cluster)
    deadline = time.monotonic() + 10
    while obeys and process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    fault.end(cluster)
    assert fault.felt == obeys
    assert process.status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize(("is_limited", "felt"), [(True, 1), (False, 0)])
def test_a_full_disk_stops_logs(monkeypatch, is_limited, felt):
    """A log that grows all the same was not refused; one that never grows says nothing."""
    monkeypatch.setattr("kvberth.drills.faults._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("kvberth.drills.faults._LOG_SECONDS", 0.1)
    sizes = {"busy": 100, "idle": 0}
    limits = []

    def log_bytes() -> dict[str, int]:
        if not is_limited or limits[-1] is None:
            sizes["busy"] += 1
        return dict(sizes)

    fault = DiskFull()
    cluster = SimpleNamespace(limit_files=limits.append, log_bytes=log_bytes)
    fault.begin(cluster)
    fault.end(cluster)
    assert limits == [0, None]
    assert fault.felt == felt


@pytest.mark.parametrize("is_bent", [False, True])
def test_clocks_that_jump_are_seen_in_answers(is_bent):
    """And go right again."""
    offsets: dict[str, float] = {}

    def clock_error(name: str) -> float:
        if name == "dead":
            raise OSError("refused")
        return offsets[name] + 1.0 if is_bent else 0.0

    fault = ClockJumps({"one": 3600.0, "two": -3600.0, "dead": 3600.0})
    cluster = SimpleNamespace(set_clock=offsets.__setitem__, clock_error=clock_error)
    fault.begin(cluster)
    assert offsets == {"one": 3600.0, "two": -3600.0, "dead": 3600.0}
    fault.end(cluster)
    assert offsets == {"one": 0.0, "two": 0.0, "dead": 0.0}
    assert fault.felt == (2 if is_bent else 0)


@pytest.mark.parametrize(
    ("pressure", "felt"),
    [
        (MemoryPressure(0.95, 3.0, 12.0), 5),
        (MemoryPressure(0.95, 0.0, 10.0), 0),
        (MemoryPressure(0.5, 3.0, 12.0), 0),
    ],
)
def test_memory_that_is_full_is_felt_by_who_waits_or_is_preempted(monkeypatch, pressure, felt):
    """Who waits while half of it is free waits for something else."""
    monkeypatch.setattr("kvberth.drills.client_faults._FILL_SECONDS", 1.0)
    monkeypatch.setattr("kvberth.drills.client_faults._LOOK_SECONDS", 0.01)
    readings = iter([MemoryPressure(0.0, 0.0, 10.0)])
    fault = FillMemory(("one",), requests=0)
    cluster = SimpleNamespace(pressure=lambda _: next(readings, pressure), engine_url=lambda _: "http://127.0.0.1:9")
    fault.begin(cluster)
    deadline = time.monotonic() + 10
    while felt and not fault.felt:
        assert time.monotonic() < deadline
    fault.end(cluster)
    assert fault.felt == felt


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """Sends to everybody who asks, for as long as they read."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    held.append(client)
                    client.settimeout(0.2)
                    threading.Thread(target=send, args=(client,)).start()

        def send(client: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while is_talkative and client.recv(4096):
                    client.sendall(b"data: x\n\n" * 100_000)

        is_talkative = True
        accepting = threading.Thread(target=serve)
        accepting.start()
        yield listening.getsockname()
        is_talkative = False
        listening.shutdown(socket.SHUT_RDWR)
    accepting.join()
    for each in held:
        each.close()


def test_stalled_clients_have_full_buffers(server):
    """The server has answered, and they have not read it."""
    fault, cluster = Stall(count=2), SimpleNamespace(router_address=server)
    fault.begin(cluster)
    deadline = time.monotonic() + 10
    while fault.count_stalled() < 2:
        assert time.monotonic() < deadline
    fault.end(cluster)
    assert fault.felt == 2


def test_rubbish_that_is_not_taken_is_not_felt(server):
    """With nobody there, no connection counts."""
    for address, count in ((server, 5), (("127.0.0.1", 9), 0)):
        fault = Garbage(random.Random(0), count=5)  # noqa: S311
        fault.begin(SimpleNamespace(router_address=address))
        assert fault.felt == count
