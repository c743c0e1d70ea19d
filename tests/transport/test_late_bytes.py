"""Nothing lands after it has been given up, over TCP and a network that was cut or a peer that was stopped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.transport.late_bytes import FILL

from kvberth.drills.namespaces import Namespaces, why_no_namespaces
from kvberth.drills.wire import paths

pytest.importorskip("nixl", reason="NIXL is not installed", exc_type=ImportError)
WHY_NOT = why_no_namespaces()
pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"network namespaces: {WHY_NOT}"),
]

ROOT = Path(__file__).parents[2]


class Program:
    """`late_bytes` in a namespace."""

    def __init__(self, network: Namespaces, name: str) -> None:
        self.process = subprocess.Popen(
            [*network.prefix(name), sys.executable, "-m", "tests.transport.late_bytes", name],
            cwd=ROOT,
            env={**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": network.device(name)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next line that is JSON; NIXL writes others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", "[", '"', "null", "true", "false")) or line.strip().isdecimal():
                return json.loads(line)
        raise AssertionError("the program has ended")

    def do(self, *command: Any) -> Any:
        self.begin(*command)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["writer", "target"])
def network(request) -> Iterator[Namespaces]:
    """UCX lets one of the two make the connection that both use; by their addresses, whoever moves bytes."""
    with Namespaces(sorted(["writer", "target"], reverse=request.param == "writer"), seed=1) as network:
        yield network


@pytest.fixture
def ends(network) -> Iterator[tuple[Program, Program]]:
    """A writer and its target, after a first WRITE: they are connected."""
    writer, target = Program(network, "writer"), Program(network, "target")
    try:
        assert (writer.answer(), target.answer()) == ("ready", "ready")
        meet(writer, target)
        writer.do("fill", FILL)
        assert write(writer, target, 0, 1)
        yield writer, target
    finally:
        writer.close()
        target.close()


def meet(writer: Program, target: Program) -> None:
    """Each is told of the other."""
    writer.do("meet", *target.do("card"))
    target.do("meet", *writer.do("card"))


def write(writer: Program, target: Program, first: int, last: int) -> bool:
    """A WRITE that the target lets in, and that lands there; the target's memory is empty again."""
    writer.do("write", first, last)
    writer.begin("await_done", 5.0)
    target.begin("progress", 1.0)
    is_done, landed = writer.answer(), target.answer()
    target.do("fill", 0)
    return bool(is_done) and landed == last - first


def read(writer: Program, target: Program, first: int, last: int) -> bool:
    """A READ that the writer serves; the target's memory is empty again."""
    target.do("read", first, last)
    target.begin("await_done", 5.0)
    writer.do("progress", 1.0)
    is_done, values = target.answer(), target.do("values", first, last)
    target.do("fill", 0)
    return bool(is_done) and values == [FILL] * (last - first)


def cut(network: Namespaces, writer: Program) -> None:
    """The network, with a WRITE of sixteen rows on its way: part of it is in the kernel's buffer."""
    network.set_rules(paths(("writer",), ("target",), loss=1.0))
    writer.do("write", 1, 17)
    assert not writer.do("await_done", 0.5)


def test_a_writer_that_forgets_its_peer_writes_nothing_any_more(network, ends):
    """Though it lives on, and the network comes back; and the two can meet again."""
    writer, target = ends
    cut(network, writer)
    assert writer.do("forget", 1.0)
    network.set_rules([])
    assert target.do("progress", 3.0) == 0
    writer.do("meet", *target.do("card"))
    assert write(writer, target, 20, 30)


def test_a_killed_writer_writes_nothing_any_more(network, ends):
    """The kernel keeps nothing that it would send in its name."""
    writer, target = ends
    cut(network, writer)
    writer.close()
    network.set_rules([])
    assert target.do("progress", 3.0) == 0


def test_a_connection_that_was_reset_is_made_anew(network, ends):
    """By the next transfer, in either direction, and as often as it happens."""
    writer, target = ends
    for first in (20, 30, 40):
        assert writer.do("reset") > 0
        assert write(writer, target, first, first + 5)
        assert writer.do("reset") > 0
        target.do("fill", first)
        writer.do("read", 5, 9)
        writer.begin("await_done", 5.0)
        target.do("progress", 1.0)
        assert writer.answer()
        assert writer.do("values", 5, 9) == [first] * 4


def test_what_was_read_from_a_stopped_peer_never_lands(ends):
    """It would answer when it wakes up. The reader waits until that cannot be any more, which is not long."""
    writer, target = ends
    writer.process.send_signal(signal.SIGSTOP)
    target.do("read", 1, 64)
    assert not target.do("await_done", 0.3)
    assert target.do("forget", 1.0)
    wake(writer)
    assert target.do("progress", 2.0) == 0


def test_a_peer_that_wakes_up_answers_to_nobody_and_lives_on(ends):
    """Though it was stopped too late to look at the clock once more; and the two can meet again."""
    writer, target = ends
    writer.process.send_signal(signal.SIGSTOP)
    target.do("read", 1, 64)
    assert target.do("forget", 1.0)
    writer.begin("progress", 1.0)
    writer.process.send_signal(signal.SIGCONT)
    assert target.do("progress", 2.0) == 0
    writer.answer()
    writer.do("forget", 1.0)
    meet(writer, target)
    assert write(writer, target, 20, 30)
    assert read(writer, target, 30, 40)


def test_what_a_stopped_peer_was_writing_never_lands(ends):
    """Neither what its kernel has, nor what its library has queued behind that."""
    writer, target = ends
    writer.do("write", 1, 64)
    target.do("progress", 0.02)
    writer.process.send_signal(signal.SIGSTOP)
    assert target.do("progress", 0.3) < 63
    target.do("forget", 1.0)
    target.do("fill", 0)
    wake(writer)
    assert target.do("progress", 2.0) == 0


def wake(stopped: Program) -> None:
    """It first gives up on the other side, as the mover does that has slept, and goes on."""
    stopped.begin("forget", 1.0)
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.answer()
    stopped.do("progress", 0.1)


def test_a_reader_closes_as_usual(ends):
    """Only one that writes resets its connection when it is killed: UCX ends a process that would answer to a reset."""
    writer, target = ends
    assert read(writer, target, 0, 1)
    assert (writer.do("num_resetting"), target.do("num_resetting")) == (1, 0)


def test_both_meet_again(ends):
    """After one had been stopped, and each has given up on the other."""
    writer, target = ends
    writer.process.send_signal(signal.SIGSTOP)
    target.do("read", 1, 64)
    assert target.do("forget", 1.0)
    wake(writer)
    meet(writer, target)
    assert write(writer, target, 20, 30)
    assert read(writer, target, 30, 40)
