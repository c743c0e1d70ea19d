"""Connections are found by their ends, and cut so that nothing more comes out of them."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvberth.transport.tcp import abort_connections, discard_unsent_on_close

HOST = "127.0.0.1"


@dataclass
class Pair:
    """A connection, and what an agent's metadata has of the listener; nothing is read from `accepted`."""

    made: socket.socket
    accepted: socket.socket
    listener: bytes


def metadata(host: str, port: int) -> bytes:
    """As in a UCX address: somewhere in it, in network order."""
    return b"UCX" + bytes(5) + socket.inet_aton(host) + bytes(7) + port.to_bytes(2, "big") + bytes(5)


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


def test_accepted_connections_count_if_they_do_not_drain(pairs):
    """Whose they are cannot be told by the port."""
    one, other = pairs
    peer = metadata(HOST, 1)
    assert abort_connections(one.listener, peer) == 0
    sent = stuff(one.accepted)
    assert abort_connections(one.listener, peer) == 1
    assert drain(one.made) < sent
    other.accepted.sendall(b"still here")
    assert other.made.recv(100) == b"still here"


def test_strangers_are_left_alone(pairs):
    """Neither another host nor another port."""
    one, _ = pairs
    port = one.made.getpeername()[1]
    assert abort_connections(b"", metadata("10.0.0.9", 1)) == 0
    assert abort_connections(b"", one.listener.replace(port.to_bytes(2, "big"), bytes(2))) == 0
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
