"""What the mover's thread does, without the thread: frames and commands in, frames and results out.

The core is told the time and never waits, so that a test can run two cores against each other step by step.

Memory safety rests on two rules. A producer posts to a consumer only within `Timing.grant_seconds` of a moment of its
own clock that the consumer has answered, and a consumer takes its blocks back without the producer's word only later
than that: a producer that was stopped, or that hears late, does not write into blocks that have become somebody
else's; nor does it drive the transport before it has cut off a consumer whose time is over. And every block id that a
peer names is checked against its own region before anything is posted.
"""

from kvberth.keys import Certificate
from kvberth.mover.address import Address
from kvberth.mover.commands import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    Command,
    DeclineRequest,
    EndPrefill,
    FinishPrefill,
    PrefillCommand,
    RestartPrefill,
    SchedulePrefill,
)
from kvberth.mover.consumer_side import ConsumerSide
from kvberth.mover.fences import FencedCommands
from kvberth.mover.inbox import Outbox
from kvberth.mover.producer_side import ProducerSide
from kvberth.mover.wire import Wire
from kvberth.protocol import EngineCard, Timing
from kvberth.protocol.events import RequestAborted
from kvberth.transport import Transport

__all__ = ["Core"]

_LIVE_POLL_SECONDS = 0.001
"""How often the transport is looked at while bytes may be moving."""


class Core:
    """One rank's handoffs, in both roles. Used by one thread.

    Args:
        card: what peers are told of this rank.
        transport: with the card's regions registered.
        wire: the control channel.
        outbox: where results go.
        timing: leases, deadlines, heartbeats.
    """

    def __init__(self, card: EngineCard, transport: Transport, wire: Wire, outbox: Outbox, timing: Timing) -> None:
        self._rank = card.rank
        self._transport = transport
        self._producing = ProducerSide(card, transport, wire, outbox, timing)
        self._consuming = ConsumerSide(card, transport, wire, outbox, timing)
        self._fenced = FencedCommands()

    def is_moving(self) -> bool:
        """Whether bytes may be moving, so that the transport must be driven on this side."""
        return self._producing.is_moving() or self._consuming.is_moving()

    def look(self, now: float) -> None:
        """First thing in a turn, before the engine's commands are taken: drive the transport, see what has landed.

        If a consumer owes us a sign of life, we may have been stopped, and it have taken its blocks back: nothing that
        we had posted, or that it had asked for, must leave before `turn` has heard of it or cut it off.
        """
        if self.is_moving() and not self._producing.is_overdue(now):
            self._transport.progress()
            self._producing.look()
            self._consuming.look()

    def num_waiting(self) -> int:
        """Batches of descriptors that have not been posted yet."""
        return self._producing.num_waiting() + self._consuming.num_waiting()

    def next_wakeup(self, now: float) -> float | None:
        """Seconds until `turn` has something to do without a frame or a command; None for never."""
        if self.is_moving():
            has_news = self._producing.has_news() or self._consuming.has_news()
            return 0.0 if has_news else _LIVE_POLL_SECONDS
        if self._fenced:
            return _LIVE_POLL_SECONDS
        moments = [self._producing.next_moment(), self._consuming.next_moment()]
        due = min((moment for moment in moments if moment is not None), default=None)
        return None if due is None else max(0.0, due - now)

    def command(self, command: Command, now: float) -> None:
        """One command of the engine."""
        match command:
            case AnnouncePrefill() | AdvancePrefill() | RestartPrefill() | FinishPrefill() | EndPrefill():
                if not self._fenced.hold(command):
                    self._prefill(command, now)
            case SchedulePrefill(keys, num_tokens):
                for key in keys:
                    self._producing.scheduled(key, num_tokens)
            case AwaitRequest(key, host, port, request, identity) | DeclineRequest(key, host, port, request, identity):
                self._consuming.begin(key, Address(f"{host}:{port + self._rank}", identity), request, now)
            case AbortRequest(key):
                self._consuming.tell(key, RequestAborted(), now)

    def _prefill(self, command: PrefillCommand, now: float) -> None:
        for key in command.keys:
            self._producing.tell(key, command.event, now)

    def frame_from_client(self, route: bytes, frame: bytes, now: float, sender: Certificate | None = None) -> None:
        """A frame from somebody who dialled us; `sender` is None where the control channel is not authenticated."""
        self._producing.receive(route, frame, now, sender)

    def client_revoked(self, route: bytes, now: float) -> None:
        """The key of somebody who dialled us is not accepted any more."""
        self._producing.revoked(route, now)

    def frame_from_server(self, address: Address, frame: bytes, now: float) -> None:
        """A frame from a producer that we dialled."""
        self._consuming.receive(address, frame, now)

    def clients_broke(self, now: float) -> None:
        """The connection of an engine that dialled us broke."""
        self._producing.clients_broke(now)

    def server_broke(self, address: Address, now: float) -> None:
        """The connection to a producer that we dialled broke; it is being made anew."""
        self._consuming.broke(address, now)

    def server_denies(self, address: Address, now: float) -> None:
        """A producer that we dialled does not accept our key, or only one of us has keys."""
        self._consuming.denied(address, now)

    def server_cuts_short(self, address: Address) -> None:
        """A producer that we dialled has closed the connection before either side had proved who it is."""
        self._consuming.cut_short(address)

    def server_refuses(self, address: Address, now: float) -> None:
        """Nobody listens at the address of a producer that we dialled."""
        self._consuming.refused(address, now)

    def turn(self, now: float, last_look: float | None = None) -> None:
        """Everything that time and the transport bring.

        Args:
            now: the time.
            last_look: when the engine last took in new requests; None for an engine that is idle.
        """
        for command in self._fenced.passed():
            self._prefill(command, now)
        self._producing.turn(now, now if last_look is None else last_look)
        self._consuming.turn(now)

    def close(self, now: float) -> None:
        """Drop all peers, so that nothing of theirs reaches our memory any more."""
        self._producing.lose_all("this engine is shutting down", now)
        self._consuming.lose_all("this engine is shutting down", now)
