"""The consumer's half of a rank: producers that we dialled, and the transfers that we wait for."""

import logging
from functools import partial

from kvberth.layout import Mismatch, find_mismatch
from kvberth.mover.address import Address, NotAccepted
from kvberth.mover.flights import Flights
from kvberth.mover.inbox import Outbox
from kvberth.mover.links import Link, LinkState
from kvberth.mover.seldom import Seldom
from kvberth.mover.wire import Wire, block_error, card_error, disconnect, plan_transfer, report_end
from kvberth.protocol import (
    PROTOCOL_VERSION,
    Action,
    Consumer,
    EndRecord,
    EngineCard,
    MalformedMessage,
    Reason,
    ReleaseRequest,
    ReportReceived,
    SendMessage,
    StartRead,
    StartWrite,
    StopPosting,
    Timing,
    TransferKey,
    VersionMismatch,
    decode,
    encode,
)
from kvberth.protocol.consumer_states import ConsumerState
from kvberth.protocol.events import (
    ConsumerEvent,
    PeerReady,
    PeerRefused,
    ReadsDone,
    ReadsFailed,
)
from kvberth.protocol.ids import PeerName
from kvberth.protocol.messages import (
    Accepted,
    Alive,
    Ended,
    Heartbeat,
    Hello,
    HelloNeeded,
    Incompatible,
    Located,
    Message,
    Quiesced,
    Welcome,
    Writing,
)
from kvberth.transport import Direction, Transport, TransportError

__all__ = ["ConsumerSide"]

_log = logging.getLogger(__name__)


class ConsumerSide:
    """Drives `Consumer`. Used by the mover's thread only."""

    def __init__(self, card: EngineCard, transport: Transport, wire: Wire, outbox: Outbox, timing: Timing) -> None:
        self._card = card
        self._transport = transport
        self._wire = wire
        self._outbox = outbox
        self._timing = timing
        self._machine = Consumer(card.fingerprint.block_size, timing)
        self._flights = Flights(transport)
        self._links: dict[Address, Link] = {}
        self._sessions = 0
        self._malformed, self._foreign, self._unsent = Seldom(), Seldom(), Seldom()
        self._agents: dict[PeerName, str] = {}

    def is_moving(self) -> bool:
        """Whether bytes may be moving: our READs, or WRITEs of a producer, also those that it has to end."""
        machine = self._machine
        is_written_to = machine.count(ConsumerState.RECEIVING) or machine.count(ConsumerState.CANCELLING)
        return self._flights.is_moving() or bool(is_written_to)

    def look(self) -> None:
        """See what has landed by now; `turn` acts on it."""
        self._flights.look()

    def has_news(self) -> bool:
        """Whether the next look should follow at once."""
        return self._flights.has_news

    def num_waiting(self) -> int:
        """Batches of descriptors that have not been posted yet."""
        return self._flights.num_waiting()

    def next_moment(self) -> float | None:
        """When time alone gives us something to do."""
        moments = [self._machine.next_deadline()]
        for link in self._links.values():
            if link.state is LinkState.GREETING:
                moments.append(link.opened_at + self._greeting_seconds(link))
            elif self._is_live(link):
                moments.append(min(link.next_heartbeat, link.last_heard + self._timing.silence_seconds))
        return min((moment for moment in moments if moment is not None), default=None)

    def begin(self, key: TransferKey, address: Address, event: ConsumerEvent, now: float) -> None:
        """A request waits for, or declines, the KV of the producer at `address`."""
        self.tell(key, event, now)
        if not self._machine.awaits_peer(key):  # declined while it is with a producer already
            return
        try:
            address = self._wire.resolve(address, now)
        except NotAccepted as error:
            _log.error("kvberth: prefill worker at %s is not asked: %s", address, error)
            self.tell(key, PeerRefused(Reason.NOT_AUTHENTICATED, str(error)), now)
            return
        link = self._links.get(address)
        if link is None:
            self._sessions += 1
            link = self._links[address] = Link(address, self._sessions, opened_at=now, last_heard=now)
            self._wire.dial(address)
            self._greet(link, now)
        if link.peer is None or link.state is LinkState.GREETING:
            link.waiting.append(key)
            return
        if not self._is_live(link):  # nothing has been said for a while: the silence starts to count now
            link.last_heard, link.next_heartbeat = now, now
        self.tell(key, PeerReady(link.peer), now)

    def tell(self, key: TransferKey, event: ConsumerEvent, now: float) -> None:
        """Something happened to a transfer."""
        self._do(self._machine.handle(key, event, now), now)

    def receive(self, address: Address, frame: bytes, now: float) -> None:
        """A frame from a producer that we dialled."""
        link = self._links.get(address)
        if link is None:
            return
        link.last_heard = now
        try:
            message = decode(frame)
        except VersionMismatch as error:
            mismatch = Mismatch("protocol_version", str(error.theirs), str(PROTOCOL_VERSION))
            self._refuse(link, Reason.INCOMPATIBLE, str(mismatch), now)
        except MalformedMessage as error:
            if count := self._malformed.count(now):
                text = "kvberth: dropped %d control messages of prefill workers, the last from %s: %s"
                _log.warning(text, count, address, error)
        else:
            self._dispatch(link, message, now)

    def broke(self, address: Address, now: float) -> None:
        """The connection to a producer broke. It is made anew by itself, and nothing is lost if the producer lives."""
        link = self._links.get(address)
        if link is None or link.state is LinkState.GREETING:
            return
        if self._is_live(link):
            self._greet(link, now)
        else:  # the next request dials anew
            _log.info("kvberth: prefill worker at %s has closed its connection", address)
            self._drop(link, Reason.PEER_LOST, "it has closed its connection", now)

    def denied(self, address: Address, now: float) -> None:
        """A producer does not accept our key, or only one of us has keys.

        One that has accepted it before may still be writing to us: its silence tells when that is over.
        """
        link = self._links.get(address)
        if link is not None and link.peer is None:
            detail = f"{address} does not accept this engine's key, or only one of the two has keys"
            self._refuse(link, Reason.NOT_AUTHENTICATED, detail, now)

    def cut_short(self, address: Address) -> None:
        """A producer closes connections before either side has proved who it is: perhaps it does so each time."""
        link = self._links.get(address)
        if link is not None:
            link.was_cut_short = True

    def refused(self, address: Address, now: float) -> None:
        """Nobody listens at a producer's address: it is gone for certain, and writes no more."""
        link = self._links.get(address)
        if link is None or link.state is LinkState.READY:
            return
        if link.peer is None:
            self._refuse(link, Reason.PEER_UNREACHABLE, f"{address} refuses connections", now)
        else:
            self._lose(link, "its process has ended", now)

    def turn(self, now: float) -> None:
        """Liveness, then deadlines, then transfers."""
        for link in list(self._links.values()):
            self._check(link, now)
        self._do(self._machine.fire(now), now)
        for landing in self._flights.advance():
            moved = (landing.num_bytes, landing.num_descriptors)
            self.tell(landing.key, ReadsFailed(landing.error) if landing.error else ReadsDone(*moved), now)

    def lose_all(self, detail: str, now: float) -> None:
        """Give up on every producer that we wait for."""
        for link in list(self._links.values()):
            if link.state is LinkState.GREETING or self._is_live(link):
                self._lose(link, detail, now)

    # Links.

    def _is_live(self, link: Link) -> bool:
        return link.peer is not None and self._machine.has_live(link.peer)

    def _check(self, link: Link, now: float) -> None:
        if link.state is LinkState.GREETING:
            patience = self._greeting_seconds(link)
            if now - link.opened_at < patience:
                return
            if link.peer is None and link.was_cut_short:
                detail = f"{link.address} closes connections before it says who it is: it does not accept this engine's"
                detail += " key, only one of the two has keys, or something else listens there"
                self._refuse(link, Reason.NOT_AUTHENTICATED, detail, now)
            elif link.peer is None:
                detail = f"no answer from {link.address} within {patience:g} s"
                self._refuse(link, Reason.PEER_UNREACHABLE, detail, now)
            else:
                self._lose(link, f"its connection broke, and no answer came within {patience:g} s", now)
        elif link.peer is not None and self._is_live(link):
            if now - link.last_heard >= self._timing.silence_seconds:
                self._lose(link, f"silent for {now - link.last_heard:.1f} s", now)
            elif now >= link.next_heartbeat:
                if link.last_heard < link.next_heartbeat - self._timing.heartbeat_seconds:
                    self._outbox.heartbeat_missed()
                link.next_heartbeat = now + self._timing.heartbeat_seconds
                self._wire.send_to_server(link.address, encode(Heartbeat(self._machine.live_with(link.peer))))
                self._do(self._machine.repeat_cancels(link.peer), now)

    def _dispatch(self, link: Link, message: Message, now: float) -> None:
        match message:
            case Welcome(card):
                self._welcome(link, card, now)
            case Incompatible(field, producer_value, consumer_value):
                self._refuse(link, Reason.INCOMPATIBLE, str(Mismatch(field, producer_value, consumer_value)), now)
            case HelloNeeded():
                self._greet(link, now)
            case Heartbeat(stamp=stamp):
                if link.state is LinkState.READY:  # one that may yet be refused is promised nothing
                    self._wire.send_to_server(link.address, encode(Alive(stamp)))
            case Located(blocks=blocks, block_size=block_size) if link.card is not None and (
                error := block_error(blocks, block_size, link.card)
            ):
                self._lose(link, f"it offers blocks that it cannot have: {error}", now)
            case Accepted() | Writing() | Located() | Ended() | Quiesced() if self._machine.is_of_another(
                message.key, link.peer
            ):
                if count := self._foreign.count(now):
                    text = "kvberth: prefill worker at %s speaks of a transfer that is with another one (%d)"
                    _log.warning(text, link.address, count)
            case Accepted() | Writing() | Located() | Ended() | Quiesced():
                self.tell(message.key, message, now)
            case _:
                if count := self._unsent.count(now):
                    text = "kvberth: a prefill worker does not send %s; dropped (%d)"
                    _log.warning(text, type(message).__name__, count)

    def _greeting_seconds(self, link: Link) -> float:
        """One that we have never spoken to may still be starting; one that we know has been silent for as long."""
        return self._timing.connect_seconds if link.peer is None else self._timing.silence_seconds

    def _greet(self, link: Link, now: float) -> None:
        """Say hello. Until the answer is here, no heartbeat may name what the producer has yet to be told of."""
        link.state, link.opened_at = LinkState.GREETING, now
        self._wire.send_to_server(link.address, encode(Hello(self._card, link.session)))

    def _welcome(self, link: Link, card: EngineCard, now: float) -> None:
        """The producer can be used, now or again.

        It may have been restarted since, or have forgotten us. What it has not answered is registered anew; what the
        old incarnation had accepted is lost with it.
        """
        old, new = link.peer, link.name_of(card)
        if error := card_error(card):
            self._refuse(link, Reason.INCOMPATIBLE, f"its card cannot be used: {error}", now)
            return
        mismatch = find_mismatch(producer=card.fingerprint, consumer=self._card.fingerprint)
        if mismatch is not None:
            self._refuse(link, Reason.INCOMPATIBLE, str(mismatch), now)
            return
        if old is not None and old != new:
            self._disconnect(old)
        if new not in self._agents:
            try:
                agent = self._transport.add_peer(card.agent_metadata)
            except TransportError as error:
                self._refuse(link, Reason.TRANSPORT, str(error), now)
                return
            if agent in self._agents.values():
                self._refuse(link, Reason.INCOMPATIBLE, "its transport's metadata is another prefill worker's", now)
                return
            self._agents[new] = agent
            _log.info("kvberth: prefill worker %s at %s is connected", card.engine_id, link.address)
        link.card, link.state, link.next_heartbeat = card, LinkState.READY, now
        waiting = dict.fromkeys(key for key in link.waiting if self._machine.awaits_peer(key))
        link.waiting.clear()
        for key in (*waiting, *(self._machine.unanswered(old) if old is not None else ())):
            self.tell(key, PeerReady(new), now)
        if old is not None and old != new:
            self._do(self._machine.lose_peer(old, "the prefill worker was restarted", now), now)

    def _refuse(self, link: Link, reason: Reason, detail: str, now: float) -> None:
        """The producer cannot be used: end what waits for it, and try anew with the next request."""
        _log.error("kvberth: prefill worker at %s cannot be used: %s", link.address, detail)
        self._drop(link, reason, detail, now)

    def _lose(self, link: Link, detail: str, now: float) -> None:
        _log.error("kvberth: prefill worker at %s is lost: %s", link.address, detail)
        self._drop(link, Reason.PEER_LOST, detail, now)

    def _drop(self, link: Link, reason: Reason, detail: str, now: float) -> None:
        del self._links[link.address]
        self._wire.hang_up(link.address)
        if link.peer is not None:
            self._cut(link.peer, detail, now)
        for key in link.waiting:
            self.tell(key, PeerRefused(reason, detail), now)

    def _cut(self, peer: PeerName, detail: str, now: float) -> None:
        """Tear down the transport to a producer, and only then let its transfers end.

        That ends our READs and, over TCP, what it writes. Besides, it has stopped to write before we come to this
        (`Timing.grant_seconds`), unless it was stopped itself.
        """
        self._disconnect(peer)
        self._do(self._machine.lose_peer(peer, detail, now), now)

    def _disconnect(self, peer: PeerName) -> None:
        agent = self._agents.pop(peer, None)
        if agent is not None:
            disconnect(self._transport, agent, is_live=self._machine.has_live(peer))

    # Actions.

    def _do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case SendMessage(peer, message):
                    for link in self._links.values():
                        if link.peer == peer:
                            self._wire.send_to_server(link.address, encode(message))
                case StartRead():
                    self._start(action)
                case StopPosting(key):
                    self._flights.stop(key)
                case ReportReceived():
                    self._outbox.received(action)
                case EndRecord():
                    report_end(action, self._flights, self._outbox)
                case StartWrite() | ReleaseRequest():
                    raise AssertionError(f"a consumer does not ask for {action}")

    def _start(self, action: StartRead) -> None:
        card = next(each.card for each in self._links.values() if each.peer == action.peer)
        assert card is not None
        plan = partial(plan_transfer, self._card, card, action.local_blocks, action.remote_blocks)
        self._flights.extend(action.key, Direction.READ, self._agents[action.peer], plan, is_last=True)
