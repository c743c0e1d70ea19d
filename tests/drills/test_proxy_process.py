"""The proxy before a control channel, between real ZeroMQ sockets."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from kvberth.drills.helper import Helper, HelperError
from kvberth.drills.zmtp import Meddling
from kvberth.launch import PortLease

PATIENCE_MS = 5000
QUIET_MS = 300


class Ends:
    """A server behind the proxy, and a client before it."""

    def __init__(self, ports: PortLease) -> None:
        self._context = zmq.Context()
        self.port, self.upstream = ports.take(), ports.take()
        self.server = self.new(zmq.ROUTER)
        self.server.bind(f"tcp://127.0.0.1:{self.upstream}")
        self.proxy = Helper("proxy_process", ["1", f"127.0.0.1:{self.port}", f"127.0.0.1:{self.upstream}"])
        self.client = self.new(zmq.DEALER)
        self.client.connect(f"tcp://127.0.0.1:{self.port}")

    def new(self, kind: int) -> "zmq.Socket[bytes]":
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        return made

    def to_server(self, count: int) -> list[bytes]:
        """What arrives of so many messages."""
        for number in range(count):
            self.client.send(f"message {number}".encode())
        return self.arrivals(self.server, count)

    def arrivals(self, end: "zmq.Socket[bytes]", expected: int) -> list[bytes]:
        """All that comes until it is quiet; the first may take its time."""
        found: list[bytes] = []
        while end.poll(PATIENCE_MS if len(found) < expected and not found else QUIET_MS):
            found.append(end.recv_multipart()[-1])
        return found

    def is_listening(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    @contextlib.contextmanager
    def client_loses_connection(self) -> Iterator[None]:
        """Behind it the client knows; what it sends before is lost."""
        monitor = self.client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        yield
        assert monitor.poll(PATIENCE_MS)
        self.client.disable_monitor()
        monitor.close()

    def close(self) -> None:
        self.proxy.close()
        self._context.destroy(linger=0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with PortLease() as ports:
        ends = Ends(ports)
        yield ends
        ends.close()


def test_messages_pass_in_both_directions(ends):
    """Whole, in order, as if nothing were between."""
    assert ends.to_server(100) == [f"message {number}".encode() for number in range(100)]
    ends.client.send(b"hello")
    route, _ = ends.server.recv_multipart()
    ends.server.send_multipart([route, b"x" * 100_000])
    assert ends.client.recv() == b"x" * 100_000


def test_messages_are_dropped_doubled_and_corrupted(ends):
    """As the line on its standard input says, from then on."""
    assert len(ends.to_server(1)) == 1
    ends.proxy.tell(Meddling(drop=1.0))
    ends.client.send(b"lost")
    assert not ends.server.poll(QUIET_MS)
    assert ends.proxy.tell(Meddling(duplicate=1.0)) == {"messages": 1, "cut": 0}
    assert ends.to_server(2) == [b"message 0", b"message 0", b"message 1", b"message 1"]
    ends.proxy.tell(Meddling(corrupt=1.0))
    (other,) = ends.to_server(1)
    assert len(other) == len(b"message 0")
    assert other != b"message 0"


def test_stalled_channel_brings_all_of_it_later(ends):
    """Nothing is lost, as on a connection whose peer does not read."""
    assert len(ends.to_server(1)) == 1
    ends.proxy.tell(Meddling(is_stalled=True))
    ends.client.send(b"late")
    assert not ends.server.poll(QUIET_MS)
    ends.proxy.tell(Meddling())
    assert ends.arrivals(ends.server, 1) == [b"late"]


def test_connections_that_are_cut_are_made_anew(ends):
    """ZeroMQ does that by itself; here only that the proxy lets it."""
    assert len(ends.to_server(1)) == 1
    with ends.client_loses_connection():
        assert ends.proxy.tell(Meddling(cuts=True)) == {"messages": 0, "cut": 1}
    assert len(ends.to_server(1)) == 1


def test_nobody_listens_while_the_server_is_gone(ends):
    """Who dials is refused, as without a proxy, and is let in again when the server is back."""
    assert len(ends.to_server(1)) == 1
    with ends.client_loses_connection():
        ends.server.close()
    deadline = time.monotonic() + 5
    while ends.is_listening():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ends.server = ends.new(zmq.ROUTER)
    ends.server.bind(f"tcp://127.0.0.1:{ends.upstream}")
    assert len(ends.to_server(1)) == 1


def test_a_helper_that_cannot_start_says_why():
    """The end of what it wrote."""
    with pytest.raises(HelperError, match=r"proxy_process has ended; it said last: .*IndexError"):
        Helper("proxy_process", ["1"])
