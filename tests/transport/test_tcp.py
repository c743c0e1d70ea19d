"""Connections are found by their ends, and cut so that nothing more comes out of them."""

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvberth.transport.tcp import (
    abort_connections,
    abort_muted_connections,
    discard_unsent_on_close,
    mute_connections,
)

HOST = "127.0.0.1"


@dataclass
class Pair:
    """A connection, and what an agent's metadata has of the listener; nothing is read from `accepted`."""

    made: socket.socket
    accepted: socket.socket
    listener: bytes


def metadata(host: str, port: int) -> bytes:
    """As in a UCX address: flags, family and address of the device, and further on the port behind its length."""
    device = b"\x01\x02" + bytes(12) if host == HOST else b"\x00\x02" + socket.inet_aton(host)
    return b"UCX" + bytes(5) + device + bytes(17) + b"\x82" + port.to_bytes(2, "big") + bytes(5)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Two connections to two listeners, as to two agents."""
    found = []
    for _ in range(2):
        with socket.create_server((HOST, 0)) as listener:
            made = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            found.append(Pair(made, accepted, metadata(*listener.getsockname())))
    yield found
    for pair in found:
        pair.made.close()
        pair.accepted.close()


def stuff(end: socket.socket) -> int:
    """Send until the buffers on both sides are full; returns how many bytes there were."""
    end.setblocking(False)
    total = 0
    try:
        while True:
            total += end.send(bytes(1 << 16))
    except BlockingIOError:
        return total


def drain(end: socket.socket) -> int:
    """All that still comes; a reset is an end, too."""
    end.settimeout(5)
    total = 0
    try:
        while data := end.recv(1 << 20):
            total += len(data)
    except ConnectionResetError:
        pass
    return total


def test_what_has_not_left_never_comes(pairs):
    """Only what the other side's kernel had, if that; and only of the peer that was named."""
    one, other = pairs
    sent = stuff(one.made)
    assert abort_connections(b"", one.listener) == 1
    assert drain(one.accepted) < sent
    other.made.sendall(b"still here")
    assert other.accepted.recv(100) == b"still here"


def test_accepted_connections_count_for_every_agent_of_their_host(pairs):
    """Whose they are cannot be told by the port; so they are cut only where something may be in flight."""
    one, other = pairs
    peer = metadata(HOST, 1)
    one.accepted.sendall(b"still here")
    assert abort_connections(one.listener, peer, accepted=False) == 0
    assert abort_connections(one.listener, metadata("10.0.0.9", 1)) == 0
    assert one.made.recv(100) == b"still here"
    assert abort_connections(one.listener, peer) == 1
    with pytest.raises(ConnectionResetError):
        one.made.recv(100)
    other.accepted.sendall(b"still here")
    assert other.made.recv(100) == b"still here"


def test_what_has_come_and_was_not_read_is_gone(pairs):
    """And whoever polls for the connection learns at once that it has ended."""
    one, _ = pairs
    one.made.sendall(b"too late")
    with select.epoll() as poll:
        poll.register(one.accepted, select.EPOLLIN)
        assert poll.poll(1)
        assert abort_connections(one.listener, metadata(HOST, 1)) == 1
        assert poll.poll(1)[0][1] & select.EPOLLIN
    with pytest.raises(ConnectionResetError):
        one.accepted.recv(100)


def test_what_a_dead_connection_has_left_is_gone(pairs):
    """Reset by the other side, it has no ends any more by which it could be found; one without rests is left alone."""
    one, other = pairs
    for pair, rest in ((one, b"too late"), (other, b"")):
        pair.made.sendall(rest)
        pair.made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pair.made.close()
    assert abort_connections(b"", metadata("10.0.0.9", 1), accepted=False) == 1
    with pytest.raises(ConnectionResetError):
        one.accepted.recv(100)
    with pytest.raises(ConnectionResetError):
        other.accepted.recv(100)


def test_bytes_do_not_come_over_a_muted_connection(pairs):
    """What has come before does, and whoever sends does not notice; until the connection is cut for good."""
    one, other = pairs
    one.made.sendall(b"in time")
    assert mute_connections(one.listener, metadata(HOST, 1)) == 1
    one.made.sendall(b"too late")
    assert one.accepted.recv(100) == b"in time"
    one.accepted.settimeout(0.3)
    with pytest.raises(TimeoutError):
        one.accepted.recv(100)
    assert abort_muted_connections(metadata("10.0.0.9", 1)) == 0
    assert abort_muted_connections(metadata(HOST, 1)) == 1
    with pytest.raises(ConnectionResetError):
        one.made.recv(100)
    other.made.sendall(b"still here")
    assert other.accepted.recv(100) == b"still here"


def test_a_muted_connection_hears_of_its_end(pairs):
    """Else its owner would keep it for ever."""
    one, _ = pairs
    assert mute_connections(b"", one.listener) == 1
    one.accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.accepted.close()
    with pytest.raises(ConnectionResetError):
        one.made.recv(100)


def test_none_is_muted_that_may_be_a_neighbours():
    """He would wait for ever."""
    with socket.create_server((HOST, 0)) as listener, ExitStack() as stack:
        ours = metadata(*listener.getsockname())
        for _ in range(2):
            made = stack.enter_context(socket.create_connection(listener.getsockname()))
            accepted = stack.enter_context(listener.accept()[0])
        assert mute_connections(ours, metadata(HOST, 1)) == 0
        made.sendall(b"still here")
        assert accepted.recv(100) == b"still here"


def test_strangers_are_left_alone(pairs):
    """Neither another host nor another port."""
    one, _ = pairs
    port = one.made.getpeername()[1]
    assert abort_connections(b"", metadata("10.0.0.9", port)) == 0
    assert abort_connections(b"", one.listener.replace(port.to_bytes(2, "big"), bytes(2))) == 0
    one.made.sendall(b"still here")
    assert one.accepted.recv(100) == b"still here"


def test_a_port_counts_only_where_one_is_packed(pairs):
    """Its two bytes stand somewhere in one of many addresses: the connection of an engine that lives would be cut."""
    one, _ = pairs
    port = one.made.getpeername()[1].to_bytes(2, "big")
    stranger = metadata(HOST, 1)
    for place in range(len(stranger) - 2):
        if place != stranger.index(b"\x82") + 1:
            assert abort_connections(b"", stranger[:place] + port + stranger[place + 2 :]) == 0, place
    one.made.sendall(b"still here")
    assert one.accepted.recv(100) == b"still here"


def test_close_can_throw_away_what_was_not_sent(pairs):
    """As the kernel does for a process that ends; else it would go on sending."""
    one, other = pairs
    for pair, is_discarding in ((one, True), (other, False)):
        if is_discarding:
            assert discard_unsent_on_close(b"", pair.listener) == 1
        sent = stuff(pair.made)
        pair.made.close()
        assert (drain(pair.accepted) < sent) is is_discarding


def test_no_descriptor_is_left_open(pairs):
    """It looks at all of them through copies."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        abort_connections(b"", metadata("10.0.0.9", 1))
        discard_unsent_on_close(b"", pairs[0].listener)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    ends = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(path.name))) as end:
                if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ends.add(end.getsockname()[:2])
        except OSError:  # no socket, or closed since
            continue
    return ends


@pytest.mark.nixl
def test_connections_with_a_real_agent_are_found():
    """At each place where it listens, as its metadata has it; and not by the metadata of another agent."""
    nixl = pytest.importorskip("kvberth.transport.nixl", reason="NIXL is not installed", exc_type=ImportError)
    before = listening()
    agent = nixl.NixlTransport("tcp/one", nixl.MemoryType.HOST)
    ends = listening() - before
    other = nixl.NixlTransport("tcp/two", nixl.MemoryType.HOST)
    assert ends
    for end in sorted(ends):
        with socket.create_connection(end) as made:
            abort_connections(b"", other.metadata())
            assert made.getpeername() == end
            abort_connections(b"", agent.metadata())
            with pytest.raises(OSError, match="not connected"):
                made.getpeername()
    agent.close()
    other.close()
