"""Two movers in two processes over NIXL and ZeroMQ, as engines have them."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("kvberth.transport.nixl", reason="NIXL is not installed", exc_type=ImportError)

from tests.mover.peer_process import BLOCK_BYTES, NUM_BLOCKS, make_mover, value_of

from kvberth.keys import Keyring
from kvberth.mover import AbortRequest, AwaitRequest, Mover, MoverFailed
from kvberth.protocol import ReportReceived, TransferKey, TransferMode
from kvberth.protocol.events import RequestWaiting
from kvberth.protocol.ids import RequestId

pytestmark = pytest.mark.nixl
BOTH = pytest.mark.parametrize("mode", list(TransferMode))
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Peer:
    """The prefill worker's process, spoken to line by line."""

    def __init__(self, port: int, keys_dir: Path | None = None) -> None:
        self.port = port
        command = [sys.executable, "-m", "tests.mover.peer_process", str(port)]
        command += [str(keys_dir)] if keys_dir else []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "UCX_TLS": "all"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.expect("ready", 100)
        except queue.Empty:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def tell(self, *commands: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{command}\n" for command in commands))
        self.process.stdin.flush()

    def expect(self, wanted: str, seconds: float = 10.0) -> None:
        """The line that says so; others (of NIXL's own log) are passed over."""
        deadline = time.monotonic() + seconds
        while self._lines.get(timeout=max(0.01, deadline - time.monotonic())) != wanted:
            pass

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Consumer:
    """The decode worker in the test's own process."""

    def __init__(self, keyring: Keyring | None = None, identity: str = "") -> None:
        self.memory = np.full((2, NUM_BLOCKS, BLOCK_BYTES), 255, dtype=np.uint8)
        self.identity = identity  # that P must prove
        self.mover: Mover = make_mover("D", self.memory, None, keyring)
        self.mover.start()

    def wait_for(self, peer: Peer, transfer_id: str, mode: TransferMode, blocks: tuple[int, ...]) -> None:
        event = RequestWaiting(RequestId(transfer_id), 0, mode, 0, 40, b"digest", blocks)
        self.mover.submit(AwaitRequest(TransferKey(transfer_id), "127.0.0.1", peer.port, event, self.identity))

    def report(self, seconds: float = 10.0) -> ReportReceived:
        """The next report; fails if none comes."""
        deadline = time.monotonic() + seconds
        while not (received := self.mover.take().received):
            assert time.monotonic() < deadline, "no report"
            time.sleep(0.002)
        (report,) = received
        return report


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """For tests that leave it alive."""
    peer = Peer(free_port())
    yield peer
    peer.close()


@pytest.fixture
def mortal_peer() -> Iterator[Peer]:
    """For tests that kill or stop it."""
    peer = Peer(free_port())
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def consumer() -> Iterator[Consumer]:
    consumer = Consumer()
    yield consumer
    consumer.mover.stop()


@BOTH
def test_bytes_cross_the_process(peer, consumer, mode):
    """Every byte of three scattered blocks, in either order of arrival."""
    for number, order in enumerate(["early", "late"]):
        transfer_id, blocks = f"{mode}-{order}", (10 + number, 30, 11 + number)
        if order == "early":
            consumer.wait_for(peer, transfer_id, mode, blocks)
            peer.tell(f"announce {transfer_id}", f"finish {transfer_id}")
        else:
            peer.tell(f"announce {transfer_id}", f"finish {transfer_id}")
            consumer.wait_for(peer, transfer_id, mode, blocks)
        assert consumer.report().ok
        for position, block in enumerate(blocks):
            assert (consumer.memory[:, block] == value_of(transfer_id, position)).all()
        peer.expect(f"released {transfer_id}")


@BOTH
def test_killed_producer_is_noticed_at_once(mortal_peer, consumer, mode):
    """SIGKILL while D waits: its machine refuses connections from then on."""
    mortal_peer.tell(f"announce killed-{mode}")
    consumer.wait_for(mortal_peer, f"killed-{mode}", mode, (1, 2, 3))
    time.sleep(0.5)
    mortal_peer.kill()
    began = time.monotonic()
    report = consumer.report()
    assert (report.ok, report.reason) == (False, "peer_lost")
    assert time.monotonic() - began < 1.0


@BOTH
def test_killed_consumer_is_noticed_within_a_second(peer, mode):
    """SIGKILL while P computes: the binding ends, and the blocks are kept for another attempt only."""
    transfer_id = f"orphaned-{mode}"
    peer.tell(f"announce {transfer_id}")
    waiter = subprocess.Popen(
        [sys.executable, "-m", "tests.mover.waiting_process", str(peer.port), transfer_id, mode], cwd=ROOT
    )
    try:
        peer.expect("connected W", 30)
        time.sleep(0.5)  # and is registered
    finally:
        waiter.kill()
        waiter.wait(10)
    peer.expect("lost W", 1.0)
    peer.tell(f"finish {transfer_id}")
    peer.expect(f"released {transfer_id}", 4.0)


def test_stopped_producer_is_noticed_and_does_not_write_when_it_wakes(mortal_peer, consumer):
    """SIGSTOP: D gives up; SIGCONT: P gives up too instead of writing into blocks that are no longer D's."""
    consumer.memory[:] = 255
    mortal_peer.tell("announce stopped")
    consumer.wait_for(mortal_peer, "stopped", TransferMode.PUSH, (1, 2, 3))
    time.sleep(0.5)
    mortal_peer.process.send_signal(signal.SIGSTOP)
    report = consumer.report()
    assert (report.ok, report.reason) == (False, "peer_lost")
    mortal_peer.tell("finish stopped")
    mortal_peer.process.send_signal(signal.SIGCONT)
    mortal_peer.expect("released stopped")
    assert (consumer.memory == 255).all()


def test_restarted_producer_serves_again(consumer):
    """The same port, another process: the first request after it already works."""
    first = Peer(free_port())
    try:
        first.tell("announce before", "finish before")
        consumer.wait_for(first, "before", TransferMode.PUSH, (1, 2, 3))
        assert consumer.report().ok
        first.kill()
    finally:
        first.close()
    second = Peer(first.port)
    try:
        second.tell("announce after", "finish after")
        consumer.wait_for(second, "after", TransferMode.PULL, (4, 5, 6))
        assert consumer.report().ok
        assert (consumer.memory[:, 4] == value_of("after", 0)).all()
    finally:
        second.close()


def test_abort_is_answered_and_frees_the_producer(peer, consumer):
    """A request that is aborted while P computes: D's blocks are back at once, P's when it has finished."""
    peer.tell("announce gone")
    consumer.wait_for(peer, "gone", TransferMode.PUSH, (1, 2, 3))
    time.sleep(0.2)
    consumer.mover.submit(AbortRequest(TransferKey("gone")))
    assert not consumer.report(1.0).ok
    peer.tell("finish gone")
    peer.expect("released gone")


def test_unreachable_producer_ends_the_request(consumer):
    """Nobody listens there."""

    class Nobody:
        port = free_port()

    consumer.wait_for(Nobody, "nobody", TransferMode.PUSH, (1, 2, 3))  # type: ignore[arg-type]
    assert consumer.report().reason == "peer_unreachable"


def test_taken_port_is_a_clear_error(peer):
    """Two engines on one control port: the second one says so when it starts."""
    memory = np.zeros((2, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    mover = make_mover("P2", memory, ("127.0.0.1", peer.port))
    with pytest.raises(MoverFailed, match=rf"cannot listen on 127.0.0.1:{peer.port} .*kv_port of its own"):
        mover.start()


def test_stopped_mover_refuses_work():
    """After `stop` nothing is swallowed silently."""
    mover = make_mover("D3", np.zeros((2, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8), None)
    mover.start()
    mover.stop()
    mover.stop()
    with pytest.raises(MoverFailed, match="stopped"):
        mover.submit(AbortRequest(TransferKey("any")))


def test_idle_mover_costs_nothing(peer, consumer):
    """Connected, and nothing to do: less than 0.2% of a core in the producer's process beside its own watcher."""
    peer.tell("announce one", "finish one")
    consumer.wait_for(peer, "one", TransferMode.PUSH, (1, 2, 3))
    assert consumer.report().ok
    before = os.times()
    time.sleep(1.0)
    after = os.times()
    assert (after.user + after.system) - (before.user + before.system) < 0.03
