"""The control channel's sockets: one that listens, and one per producer that we dialled.

ZeroMQ mends a broken connection by itself and says nothing of it. Its socket monitors do, so that a peer's death is
known at once: a producer learns that one of its consumers is gone, a consumer that a producer's connection broke and,
by a knock of its own at the address, whether nobody listens there any more.

With a keyring both ends prove who they are (ZeroMQ CURVE) before the first frame, and everything is encrypted.

Whoever can reach the port, with a key or without, can make us work. So what strangers cause is looked at a hundred
times a second at most; a peer that sends more than its allowance is not listened to; and a socket that is never empty,
or brings what is not wanted, rests between two handfuls. ZeroMQ reads from its connections in turn, so that the frames
of others wait only that long.
"""

import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from kvberth.keys import Certificate, Keyring, PeerRole
from kvberth.mover.address import Address, NotAccepted
from kvberth.mover.allowance import Allowance
from kvberth.mover.gate import Gate
from kvberth.mover.knock import Knock
from kvberth.mover.line import CUT_SHORT, DENIED, Line, Received
from kvberth.mover.seldom import Seldom

__all__ = ["Channel", "ChannelError", "FromClient"]

_log = logging.getLogger(__name__)

_HANDSHAKE_MS = 5_000
"""A connection that has not proved itself by then is closed."""

_FRAMES_PER_TURN = 64
"""Frames taken from one socket before the transfers get their turn, so that a flood cannot starve them."""

_REST_SECONDS = 0.005
"""For a socket that had a whole handful: something else comes first."""
_STRANGERS_REST_SECONDS = 0.01
"""Between two looks at what strangers can cause: handshakes, and connections that come to nothing."""

_UNITS_PER_SECOND, _UNITS_AT_ONCE = 1_000.0, 10_000.0
"""What one peer may send (see `Allowance`). A hundred prompts of 32k tokens per second need 700."""


_TOO_MUCH = "was more than its sender may send"


class ChannelError(Exception):
    """The control channel cannot be opened."""


class FromClient(NamedTuple):
    """A frame of somebody who dialled us; `sender` is None where the channel is not authenticated."""

    route: bytes
    frame: bytes
    sender: Certificate | None


class Channel:
    """ZeroMQ ROUTER and DEALER sockets of one rank. All calls come from one thread.

    A connection that breaks is made anew by ZeroMQ; frames may be lost with it. The protocol repairs that.

    Args:
        keyring: our own pair and the accepted peers; without one everybody is accepted.
    """

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._listener: Line | None = None
        self._gate: Gate | None = None
        self._dialled: dict[Address, Line] = {}
        self._resting: dict[zmq.Socket[bytes], float] = {}
        self._connections: dict[bytes, int] = {}  # of those who dialled us: descriptor by route
        self._revoked: set[bytes] = set()
        self._denying: list[Address] = []
        self._cutting_short: list[Address] = []
        self._allowance = Allowance(_UNITS_PER_SECOND, _UNITS_AT_ONCE)
        self._dropped = Seldom()
        self._unwanted: set[zmq.Socket[bytes]] = set()

    def listen(self, host: str, port: int) -> None:
        """Accept consumers at `tcp://host:port`.

        Raises:
            ChannelError: the address cannot be bound, most often since another engine has the port.
        """
        line = Line.open(self._context, zmq.ROUTER)
        line.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        line.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if self._keyring is not None:
            # First the gate: a server whose context has none lets in whoever has any key at all.
            self._gate = Gate(self._context, self._keyring)
            self._poller.register(self._gate.socket, zmq.POLLIN)
            line.prove(self._keyring.own, server=None)
        try:
            line.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            line.close()
            raise ChannelError(
                f"the control channel cannot listen on {host}:{port} ({error}); "
                "give each engine on a host a kv_port of its own"
            ) from error
        self._listener = self._watch_line(line)

    def resolve(self, address: Address, now: float) -> Address:
        """The address with the producer's public key as its identity, which may have been the name of its certificate.

        Raises:
            NotAccepted: we have keys, and the producer has none that is accepted as an engine's.
        """
        if self._keyring is None:
            return Address(address.endpoint)
        self._keyring.look(now)
        if not address.identity:
            raise NotAccepted(f"nobody said which key the prefill worker at {address} has")
        found = self._keyring.find(address.identity)
        if found is None:
            directory = self._keyring.peers_dir
            raise NotAccepted(f"no key in {directory} is {address.identity}, which {address} is said to have")
        if found.role is not PeerRole.ENGINE:
            raise NotAccepted(f"{found.name} is a {found.role} and no engine")
        return Address(address.endpoint, found.public_key)

    def dial(self, address: Address) -> None:
        """Connect to a producer whose address was resolved; a second call for the same one does nothing."""
        if address in self._dialled:
            return
        line = self._watch_line(Line.open(self._context, zmq.DEALER))
        if self._keyring is not None:
            line.prove(self._keyring.own, server=address.identity)
        line.knock = Knock(address.endpoint)
        line.socket.connect(f"tcp://{address}")
        self._dialled[address] = line

    def hang_up(self, address: Address) -> None:
        """Close the connection to a producer."""
        line = self._dialled.pop(address, None)
        if line is not None:
            for socket in (line.socket, line.monitor):
                if self._resting.pop(socket, None) is None:
                    self._poller.unregister(socket)
            line.close()

    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        """Send to a consumer; False if it is not connected any more."""
        assert self._listener is not None
        return self._listener.send([route, frame])

    def send_to_server(self, address: Address, frame: bytes) -> None:
        """Send to a producer that we dialled; dropped if we hung up, queued while the connection is being made."""
        line = self._dialled.get(address)
        if line is not None:
            line.send([frame])

    def watch(self, file_descriptor: int) -> None:
        """Let `wait` return when this descriptor is readable, too."""
        self._poller.register(file_descriptor, zmq.POLLIN)

    def wait(self, timeout_seconds: float | None, now: float) -> None:
        """Sleep until something can be received, a watched descriptor is readable, or the time is over."""
        for socket in [socket for socket, until in self._resting.items() if until <= now]:
            del self._resting[socket]
            self._poller.register(socket, zmq.POLLIN)
        timeout_ms = None if timeout_seconds is None else max(0, round(timeout_seconds * 1000))
        if self._resting:
            rest_ms = math.ceil((min(self._resting.values()) - now) * 1000)  # rounded down, it would be asked too early
            timeout_ms = rest_ms if timeout_ms is None else min(rest_ms, timeout_ms)
        self._poller.poll(timeout_ms)

    def admit(self, now: float) -> None:
        """Let those in who knock with an accepted key."""
        if self._gate is not None and self._gate.socket not in self._resting and self._gate.answer(now):
            self._rest(self._gate.socket, _STRANGERS_REST_SECONDS, now)

    def from_clients(self, now: float) -> Iterator[FromClient]:
        """A handful of frames that have arrived from consumers and routers."""
        if self._listener is None:
            return
        if self._keyring is not None:
            self._keyring.look(now)
        for received in self._handful(self._listener, now):
            route, frame, num_parts = received
            if num_parts != 2:
                self._drop(self._listener.socket, "has several parts", now)
                continue
            if route not in self._connections:
                try:
                    self._connections[route] = int(frame.get(zmq.SRCFD))
                except zmq.ZMQError:  # ZeroMQ takes bytes without its greeting for ZMTP 1.0, and knows little of them
                    self._drop(self._listener.socket, "is of a ZeroMQ before 3.0", now)
                    continue
            sender = None
            if self._keyring is not None:
                sender = self._keyring.with_key(str(frame.get("User-Id")))
                if sender is None:
                    self._revoked.add(route)
                    self._drop(self._listener.socket, "is of a peer whose key is not accepted any more", now)
                    continue
            if self._allowance.take(sender.public_key if sender else route, len(frame), now):
                yield FromClient(route, frame.bytes, sender)
            else:
                self._drop(self._listener.socket, _TOO_MUCH, now)

    def revoked_clients(self) -> set[bytes]:
        """Routes of those whose key has been taken out while they were connected, and who have sent something since."""
        revoked, self._revoked = self._revoked, set()
        return revoked

    def from_servers(self, now: float) -> Iterator[tuple[Address, bytes]]:
        """A handful of pairs (address, frame) from each producer that we dialled."""
        for address, line in list(self._dialled.items()):
            for _, frame, _ in self._handful(line, now):
                if self._allowance.take(address, len(frame), now):
                    yield address, frame.bytes
                else:
                    self._drop(line.socket, _TOO_MUCH, now)

    def has_broken_clients(self, now: float) -> bool:
        """Whether the connection of somebody who had sent us something has broken since the last look."""
        if self._listener is None or self._listener.monitor in self._resting:
            return False
        events = self._listener.events()
        if not events:
            return False
        self._rest(self._listener.monitor, _STRANGERS_REST_SECONDS, now)
        closed = {value for event, value in events if event == zmq.EVENT_DISCONNECTED}
        # A descriptor of -1: this ZeroMQ does not tell whose it was.
        broken = [route for route, descriptor in self._connections.items() if descriptor in closed or descriptor < 0]
        for route in broken:
            del self._connections[route]
        return bool(broken)

    def broken_servers(self) -> list[Address]:
        """Producers whose connection has broken since the last look. ZeroMQ goes on trying to connect."""
        broken = []
        for address, line in self._dialled.items():
            for event, value in line.events():
                assert line.knock is not None
                if event == zmq.EVENT_CONNECTED:
                    line.knock.remember(value)
                    continue
                if event in DENIED:
                    self._denying.append(address)
                    continue
                if event == CUT_SHORT:
                    self._cutting_short.append(address)
                    continue
                if event == zmq.EVENT_DISCONNECTED:
                    broken.append(address)
                line.knock.try_now()
        return broken

    def denying_servers(self) -> list[Address]:
        """Producers that do not accept our key, or one of us has none. ZeroMQ may give up on such a connection."""
        denying, self._denying = self._denying, []
        return denying

    def cutting_servers(self) -> list[Address]:
        """Producers that have closed a connection before either side had proved who it is. ZeroMQ tries again."""
        cutting, self._cutting_short = self._cutting_short, []
        return cutting

    def refusing_servers(self) -> list[Address]:
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
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._context.term()

    def _handful(self, line: Line, now: float) -> Iterator[Received]:
        """What has come, up to a handful. The socket rests if there may be more, or if some of it was not wanted."""
        for _ in range(_FRAMES_PER_TURN):
            # It may be closed by what came: the producer is hung up.
            if line.socket in self._resting or line.socket.closed or (received := line.receive()) is None:
                break
            yield received
        else:
            self._rest(line.socket, _REST_SECONDS, now)
        if line.socket in self._unwanted:
            self._unwanted.discard(line.socket)
            self._rest(line.socket, _REST_SECONDS, now)

    def _drop(self, socket: "zmq.Socket[bytes]", why: str, now: float) -> None:
        """A frame is not wanted. Where it came from, more may follow at any pace."""
        if count := self._dropped.count(now):
            _log.warning("kvberth: dropped %d control messages; the last one %s", count, why)
        self._unwanted.add(socket)

    def _rest(self, socket: "zmq.Socket[bytes]", seconds: float, now: float) -> None:
        """Something comes from there all the time: do not be woken by it for a moment."""
        if not socket.closed and socket not in self._resting:
            self._poller.unregister(socket)
            self._resting[socket] = now + seconds

    def _watch_line(self, line: Line) -> Line:
        self._poller.register(line.socket, zmq.POLLIN)
        self._poller.register(line.monitor, zmq.POLLIN)
        return line
