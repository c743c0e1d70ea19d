"""The control channel's sockets: one that listens, and one per producer that we dialled."""

import logging
from collections.abc import Iterator

import zmq

from kvberth.protocol.messages import MAX_FRAME_BYTES

__all__ = ["Channel", "ChannelError"]

_log = logging.getLogger(__name__)

_QUEUED_FRAMES = 10_000
"""Frames that wait for a peer that does not read; beyond them frames are dropped, and the heartbeats repair it."""


class ChannelError(Exception):
    """The control channel cannot be opened."""


class Channel:
    """ZeroMQ ROUTER and DEALER sockets of one rank. All calls come from one thread.

    A connection that breaks is made anew by ZeroMQ; frames may be lost with it. The protocol repairs that.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._listener: zmq.Socket[bytes] | None = None
        self._dialled: dict[str, zmq.Socket[bytes]] = {}

    def listen(self, host: str, port: int) -> None:
        """Accept consumers at `tcp://host:port`.

        Raises:
            ChannelError: the address cannot be bound, most often since another engine has the port.
        """
        socket = self._new_socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            socket.close()
            raise ChannelError(
                f"the control channel cannot listen on {host}:{port} ({error}); "
                "give each engine on a host a kv_port of its own"
            ) from error
        self._listener = socket
        self._poller.register(socket, zmq.POLLIN)

    def dial(self, address: str) -> None:
        """Connect to a producer at `host:port`; a second call for the same address does nothing."""
        if address in self._dialled:
            return
        socket = self._new_socket(zmq.DEALER)
        socket.connect(f"tcp://{address}")
        self._dialled[address] = socket
        self._poller.register(socket, zmq.POLLIN)

    def hang_up(self, address: str) -> None:
        """Close the connection to a producer."""
        socket = self._dialled.pop(address, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()

    def send_to_client(self, route: bytes, frame: bytes) -> None:
        """Send to a consumer; dropped if it is not connected."""
        assert self._listener is not None
        self._send(self._listener, [route, frame])

    def send_to_server(self, address: str, frame: bytes) -> None:
        """Send to a producer that we dialled; dropped if we hung up, queued while the connection is being made."""
        socket = self._dialled.get(address)
        if socket is not None:
            self._send(socket, [frame])

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
            parts = self._receive(self._listener)
            if parts is None:
                return
            if len(parts) == 2:
                yield parts[0], parts[1]
            else:
                _log.warning("kvberth: dropped a control message of %d parts; expected 1", len(parts) - 1)

    def from_servers(self, limit: int) -> Iterator[tuple[str, bytes]]:
        """Up to `limit` pairs (address, frame) from each producer that we dialled."""
        for address, socket in list(self._dialled.items()):
            for _ in range(limit):
                if socket.closed or (parts := self._receive(socket)) is None:
                    break
                yield address, parts[-1]

    def close(self) -> None:
        """Close all sockets at once; what is still queued is given a short time to leave."""
        for socket in self._dialled.values():
            socket.close(linger=100)
        self._dialled.clear()
        if self._listener is not None:
            self._listener.close(linger=100)
            self._listener = None
        self._context.term()

    def _new_socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    @staticmethod
    def _send(socket: "zmq.Socket[bytes]", parts: list[bytes]) -> None:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("kvberth: a peer does not read its control messages; one was dropped")

    @staticmethod
    def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
