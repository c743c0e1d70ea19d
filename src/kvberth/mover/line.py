"""One ZeroMQ socket of the control channel, and what ZeroMQ tells of its connections."""

import logging
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from kvberth.keys import KeyPair
from kvberth.mover.knock import Knock
from kvberth.mover.seldom import Seldom
from kvberth.protocol.messages import MAX_FRAME_BYTES

__all__ = ["CUT_SHORT", "DENIED", "Line", "Received"]

_log = logging.getLogger(__name__)

_QUEUED_FRAMES = 10_000
"""Frames that wait for a peer that does not read; beyond them frames are dropped, and the heartbeats repair it."""

DENIED = frozenset({int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)})
"""Events of a connection that came to nothing because of a key, or of the lack of one."""

CUT_SHORT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
"""Event of a connection that the other side has closed before either had proved who it is.

That is how it looks here where the other side has found the wrong key, or none, before it had said anything itself. A
process that dies closes its connections likewise, but then refuses new ones.
"""

_OF_LISTENERS = zmq.EVENT_DISCONNECTED
_OF_DIALLED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | CUT_SHORT | sum(DENIED)
_EVENT = struct.Struct("=HI")
_EVENTS_AT_ONCE = 1000


class Received(NamedTuple):
    """A message as it came.

    Attributes:
        first: its first part if it has several: a ROUTER's route.
        frame: the last part, which knows who sent it.
        num_parts: how many there are.
    """

    first: bytes
    frame: zmq.Frame
    num_parts: int


@dataclass(slots=True)
class Line:
    """A socket with its monitor. Make it with `open`.

    Attributes:
        knock: at the address that was dialled.
        unread: messages that were dropped because the peer does not read.
    """

    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    knock: Knock | None = None
    unread: Seldom = field(default_factory=Seldom)

    @classmethod
    def open(cls, context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "Line":
        """A socket that is neither bound nor connected; a ROUTER's monitor tells of ends of connections only."""
        socket: zmq.Socket[bytes] = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        return cls(socket, socket.get_monitor_socket(_OF_LISTENERS if kind == zmq.ROUTER else _OF_DIALLED))

    def prove(self, own: KeyPair, server: str | None) -> None:
        """Prove who we are before anything is said; as a server, or as a client of the one with the key `server`."""
        if server is None:
            self.socket.curve_server = True
        else:
            self.socket.curve_serverkey = server.encode()
        self.socket.curve_publickey = own.certificate.public_key.encode()
        self.socket.curve_secretkey = own.secret_key.encode()

    def send(self, parts: list[bytes]) -> bool:
        """False if there is no such connection any more; dropped if the peer does not read."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            if count := self.unread.count(time.monotonic()):
                _log.warning("kvberth: a peer does not read its control messages; %d were dropped", count)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def receive(self) -> Received | None:
        """The next message; None if none has come."""
        try:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        first, num_parts = frame, 1
        while frame.more:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            num_parts += 1
        return Received(first.bytes if num_parts > 1 else b"", frame, num_parts)

    def events(self) -> list[tuple[int, int]]:
        """What has happened to the connections since the last look, or the first thousand of it: (event, value)."""
        found: list[tuple[int, int]] = []
        try:
            while len(found) < _EVENTS_AT_ONCE:
                found.append(_EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0]))
        except zmq.Again:
            pass
        return found

    def close(self, linger: int = 0) -> None:
        """Close both sockets; what is queued is given `linger` milliseconds to leave."""
        if self.knock is not None:
            self.knock.close()
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger)
