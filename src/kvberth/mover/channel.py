"""The control channel's sockets: one that listens, and one per producer that we dialled.

ZeroMQ mends a broken connection by itself and says nothing of it. Its socket monitors do, so that a peer's death is
known at once: a producer learns that one of its consumers is gone, a consumer that a producer's connection broke and,
by a knock of its own at the address, whether nobody listens there any more.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvberth.mover.knock import Knock
from kvberth.protocol.messages import MAX_FRAME_BYTES

__all__ = ["Channel", "ChannelError"]

_log = logging.getLogger(__name__)

_QUEUED_FRAMES = 10_000
"""Frames that wait for a peer that does not read; beyond them frames are dropped, and the heartbeats repair it."""

_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class ChannelError(Exception):
    """The control channel cannot be opened."""


@dataclass(slots=True)
class _Line:
    """A socket, and the one on which ZeroMQ tells of its connections."""

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    knock: Knock | None = None

    def events(self) -> list[tuple[int, int]]:
        """What has happened to the connections since the last look: (event, value)."""
        found = []
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            found.append((int(message["event"]), int(message["value"])))
        return found

    def close(self, linger: int = 0) -> None:
        if self.knock is not None:
            self.knock.close()
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger)


class Channel:
    """ZeroMQ ROUTER and DEALER sockets of one rank. All calls come from one thread.

    A connection that breaks is made anew by ZeroMQ; frames may be lost with it. The protocol repairs that.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._listener: _Line | None = None
        self._dialled: dict[str, _Line] = {}

    def listen(self, host: str, port: int) -> None:
        """Accept consumers at `tcp://host:port`.

        Raises:
            ChannelError: the address cannot be bound, most often since another engine has the port.
        """
        line = self._new_line(zmq.ROUTER)
        line.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        line.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            line.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            line.close()
            raise ChannelError(
                f"the control channel cannot listen on {host}:{port} ({error}); "
                "give each engine on a host a kv_port of its own"
            ) from error
        self._listener = self._watch_line(line)

    def dial(self, address: str) -> None:
        """Connect to a producer at `host:port`; a second call for the same address does nothing."""
        if address in self._dialled:
            return
        line = self._watch_line(self._new_line(zmq.DEALER))
        line.knock = Knock(address)
        line.socket.connect(f"tcp://{address}")
        self._dialled[address] = line

    def hang_up(self, address: str) -> None:
        """Close the connection to a producer."""
        line = self._dialled.pop(address, None)
        if line is not None:
            self._poller.unregister(line.socket)
            self._poller.unregister(line.monitor)
            line.close()

    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        """Send to a consumer; False if it is not connected any more."""
        assert self._listener is not None
        return self._send(self._listener.socket, [route, frame])

    def send_to_server(self, address: str, frame: bytes) -> None:
        """Send to a producer that we dialled; dropped if we hung up, queued while the connection is being made."""
        line = self._dialled.get(address)
        if line is not None:
            self._send(line.socket, [frame])

    def watch(self, file_descriptor: int) -> None:
        """Let `wait` return when this descriptor is readable, too."""
        self._poller.register(file_descriptor, zmq.POLLIN)

    def wait(self, timeout_seconds: float | None) -> None:
        """Sleep until something can be received, a watched descriptor is readable, or the time is over."""
        self._poller.poll(None if timeout_seconds is None else max(0, round(timeout_seconds * 1000)))

    def from_clients(self, limit: int) -> Iterator[tuple[bytes, bytes]]:
        """Up to `limit` pairs (route, frame) that have arrived from consumers."""
        if self._listener is None:
            return
        for _ in range(limit):
            parts = self._receive(self._listener.socket)
            if parts is None:
                return
            if len(parts) == 2:
                yield parts[0], parts[1]
            else:
                _log.warning("kvberth: dropped a control message of %d parts; expected 1", len(parts) - 1)

    def from_servers(self, limit: int) -> Iterator[tuple[str, bytes]]:
        """Up to `limit` pairs (address, frame) from each producer that we dialled."""
        for address, line in list(self._dialled.items()):
            for _ in range(limit):
                if line.socket.closed or (parts := self._receive(line.socket)) is None:
                    break
                yield address, parts[-1]

    def has_broken_clients(self) -> bool:
        """Whether a consumer's connection has broken since the last look; ZeroMQ does not say whose."""
        return self._listener is not None and any(
            event == zmq.EVENT_DISCONNECTED for event, _ in self._listener.events()
        )

    def broken_servers(self) -> list[str]:
        """Producers whose connection has broken since the last look. ZeroMQ goes on trying to connect."""
        broken = []
        for address, line in self._dialled.items():
            for event, value in line.events():
                assert line.knock is not None
                if event == zmq.EVENT_CONNECTED:
                    line.knock.remember(value)
                    continue
                if event == zmq.EVENT_DISCONNECTED:
                    broken.append(address)
                line.knock.try_now()
        return broken

    def refusing_servers(self) -> list[str]:
        """Producers at whose address nobody listens: the process is gone, for certain."""
        return [
            address for address, line in self._dialled.items() if line.knock is not None and line.knock.is_refused()
        ]

    def close(self) -> None:
        """Close all sockets at once; what is still queued is given a short time to leave."""
        for line in self._dialled.values():
            line.close(linger=100)
        self._dialled.clear()
        if self._listener is not None:
            self._listener.close(linger=100)
            self._listener = None
        self._context.term()

    def _new_line(self, kind: int) -> _Line:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        return _Line(socket, socket.get_monitor_socket(_WATCHED))

    def _watch_line(self, line: _Line) -> _Line:
        self._poller.register(line.socket, zmq.POLLIN)
        self._poller.register(line.monitor, zmq.POLLIN)
        return line

    @staticmethod
    def _send(socket: "zmq.Socket[bytes]", parts: list[bytes]) -> bool:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("kvberth: a peer does not read its control messages; one was dropped")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    @staticmethod
    def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
