"""The producer's half of a rank: consumers that dialled us, and the transfers that we owe them."""

import logging
from functools import partial

from kvberth.keys import Certificate, PeerRole
from kvberth.layout import Mismatch, find_mismatch
from kvberth.mover.flights import Flights, Landing
from kvberth.mover.inbox import Outbox
from kvberth.mover.links import Client, name_of_peer
from kvberth.mover.seldom import Seldom
from kvberth.mover.watchers import Watchers
from kvberth.mover.wire import Wire, block_error, card_error, disconnect, plan_transfer, report_end
from kvberth.protocol import (
    PROTOCOL_VERSION,
    Action,
    End,
    EndRecord,
    EngineCard,
    MalformedMessage,
    Producer,
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
from kvberth.protocol.events import (
    CancelReceived,
    DoneReceived,
    ProducerEvent,
    RegisterReceived,
    WritesDone,
    WritesFailed,
)
from kvberth.protocol.ids import PeerName
from kvberth.protocol.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Ended,
    Heartbeat,
    Hello,
    HelloNeeded,
    Incompatible,
    Message,
    Progress,
    Register,
    Watch,
    Welcome,
)
from kvberth.protocol.producer_states import ProducerState
from kvberth.transport import Direction, Transport, TransportError

__all__ = ["ProducerSide"]

_log = logging.getLogger(__name__)

_ROUTER = PeerName("router")

_PROBE_SECONDS = 0.2
"""How long consumers are probed after a connection broke: ZeroMQ tells of it shortly before it forgets the route."""


class ProducerSide:
    """Drives `Producer`. Used by the mover's thread only."""

    def __init__(self, card: EngineCard, transport: Transport, wire: Wire, outbox: Outbox, timing: Timing) -> None:
        self._card = card
        self._transport = transport
        self._wire = wire
        self._outbox = outbox
        self._timing = timing
        self._machine = Producer(card.fingerprint.block_size, timing)
        self._flights = Flights(transport)
        self._clients: dict[PeerName, Client] = {}
        self._peer_of_route: dict[bytes, PeerName] = {}
        self._next_probe: float | None = None
        self._last_probe = 0.0
        self._malformed, self._out_of_role, self._bad_blocks = Seldom(), Seldom(), Seldom()
        self._unsent = Seldom()
        self._watchers = Watchers(card.fingerprint.block_size, self._tell_router)

    def is_moving(self) -> bool:
        """Whether bytes may be moving: our WRITEs, or READs of a consumer, also of one that is to drain them."""
        machine = self._machine
        is_read = machine.count(ProducerState.READING) or machine.count(ProducerState.DRAINING)
        return self._flights.is_moving() or bool(is_read)

    def is_overdue(self, now: float) -> bool:
        """Whether somebody owes us a sign of life; `turn` gives him up if it has not come by then."""
        return any(self._is_overdue(client, now) for client in self._clients.values())

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
        moments.append(self._next_probe)
        for client in self._clients.values():
            if client.gone_since is not None:
                moments.append(client.gone_since + self._timing.reconnect_seconds)
            if self._machine.has_live(client.peer):
                moments.append(client.silent_since + self._timing.grant_seconds)
        return min((moment for moment in moments if moment is not None), default=None)

    def scheduled(self, key: TransferKey, num_tokens: int) -> None:
        """A step begins, after which so many tokens of the prompt will have been computed."""
        self._watchers.scheduled(key, num_tokens)

    def tell(self, key: TransferKey, event: ProducerEvent, now: float) -> None:
        """Something happened to a transfer."""
        self._watchers.happened(key, event)
        self._do(self._machine.handle(key, event, now), now)

    def receive(self, route: bytes, frame: bytes, now: float, sender: Certificate | None) -> None:
        """A frame from somebody who dialled us.

        Args:
            sender: who has proved to be there; None where the control channel is not authenticated.
        """
        message = self._decoded(route, frame, now)
        if message is None or not self._may_send(sender, message, now):
            return
        peer = self._peer_of_route.get(route)
        if isinstance(message, Hello):
            self._greet(route, message, sender, now)
        elif isinstance(message, Watch):
            self._watchers.watch(message.key, route, self._machine.progress(message.key))
        elif isinstance(message, Cancel) and (peer is None if sender is None else sender.role is PeerRole.ROUTER):
            # A router, whose client has left before any decode worker was told. It waits for no answer.
            self.tell(message.key, CancelReceived(_ROUTER, message.attempt, message.reason), now)
        elif peer is None:
            self._wire.send_to_client(route, encode(HelloNeeded()))
        else:
            self._dispatch(self._clients[peer], message, now)

    def revoked(self, route: bytes, now: float) -> None:
        """The key of somebody who dialled us is not accepted any more."""
        peer = self._peer_of_route.get(route)
        if peer is not None:
            self._lose(self._clients[peer], "its key is not accepted any more", now)

    def clients_broke(self, now: float) -> None:
        """The connection of some consumer broke: find out whose. It may connect again, and lose nothing."""
        self._next_probe, self._last_probe = now, now + _PROBE_SECONDS

    def turn(self, now: float, last_look: float) -> None:
        """Liveness, then deadlines, then transfers."""
        if self._next_probe is not None and now >= self._next_probe:
            self._probe(now)
        for client in list(self._clients.values()):
            if client.gone_since is not None and now - client.gone_since >= self._timing.reconnect_seconds:
                self._lose(client, "it has closed its connection", now)
            elif self._is_overdue(client, now):
                self._lose(client, f"silent for {now - client.silent_since:.1f} s", now)
        self._do(self._machine.fire(now, last_look), now)
        proved = {client.agent for client in self._clients.values() if self._is_proved(client, now)}
        for landing in self._flights.advance(proved.__contains__):
            self._landed(landing, now)

    def lose_all(self, detail: str, now: float) -> None:
        """Give up on every consumer that waits for us."""
        for client in list(self._clients.values()):
            if self._machine.has_live(client.peer):
                self._lose(client, detail, now)

    # What comes in.

    def _decoded(self, route: bytes, frame: bytes, now: float) -> Message | None:
        """The message; None if it is none that we know."""
        try:
            return decode(frame)
        except VersionMismatch as error:
            answer = Incompatible("protocol_version", str(PROTOCOL_VERSION), str(error.theirs))
            self._wire.send_to_client(route, encode(answer))
        except MalformedMessage as error:
            if count := self._malformed.count(now):
                _log.warning("kvberth: dropped %d control messages of decode workers, the last: %s", count, error)
        return None

    def _may_send(self, sender: Certificate | None, message: Message, now: float) -> bool:
        """A router hears of a prefill and gives it up; blocks are an engine's. Both may cancel."""
        if sender is None:
            return True
        is_routers = isinstance(message, Watch | Cancel)
        if is_routers if sender.role is PeerRole.ROUTER else not isinstance(message, Watch):
            return True
        if count := self._out_of_role.count(now):
            what = type(message).__name__
            _log.warning("kvberth: %s is a %s and may not send %s (%d)", sender.name, sender.role, what, count)
        return False

    # Clients.

    def _greet(self, route: bytes, hello: Hello, sender: Certificate | None, now: float) -> None:
        card, key = hello.card, sender.public_key if sender is not None else ""
        if error := card_error(card):
            self._turn_away(route, card, Mismatch("card", "one that can be used", error))
            return
        mismatch = find_mismatch(producer=self._card.fingerprint, consumer=card.fingerprint)
        if mismatch is not None:
            self._turn_away(route, card, mismatch)
            return
        peer = name_of_peer(card, key)
        before = self._peer_of_route.get(route)
        if before is not None and before != peer:
            self._lose(self._clients[before], "its connection is another decode worker's now", now)
        for other in list(self._clients.values()):
            if (other.key, other.card.engine_id, other.card.rank) != (key, card.engine_id, card.rank):
                continue
            if other.card.incarnation != card.incarnation:
                self._lose(other, "the decode worker was restarted", now)
            elif hello.session > other.session:
                # It dials anew when it has given up on us: what it registered before names blocks that it has not kept.
                self._lose(other, "the decode worker has dialled anew", now)
            elif hello.session < other.session:
                return  # late, and of no interest to anybody
        client = self._clients.get(peer)
        if client is None:
            try:
                agent = self._transport.add_peer(card.agent_metadata)
            except TransportError as error:
                self._turn_away(route, card, Mismatch("agent_metadata", "unusable", str(error)))
                return
            if any(other.agent == agent for other in self._clients.values()):
                # Nor is it removed: it is the other one's.
                self._turn_away(route, card, Mismatch("agent_metadata", "of another decode worker", agent))
                return
            client = self._clients[peer] = Client(peer, route, card, key, agent, hello.session, now)
            name = f" ({sender.name})" if sender is not None else ""
            _log.info("kvberth: decode worker %s%s is connected", card.engine_id, name)
        self._peer_of_route.pop(client.route, None)
        client.route, client.gone_since = route, None
        self._peer_of_route[route] = peer
        self._wire.send_to_client(route, encode(Welcome(self._card)))

    def _turn_away(self, route: bytes, card: EngineCard, mismatch: Mismatch) -> None:
        _log.error("kvberth: refused decode worker %.64r: %s", card.engine_id, mismatch)
        answer = Incompatible(mismatch.field, mismatch.producer_value, mismatch.consumer_value)
        self._wire.send_to_client(route, encode(answer))

    def _dispatch(self, client: Client, message: Message, now: float) -> None:
        peer = client.peer
        match message:
            case Heartbeat(live):
                self._ask(client, now)
                self._do(self._machine.heard_live(peer, live, now), now)
            case Alive(stamp):
                client.answered(stamp, now)
            case Register(key=key, blocks=blocks, block_size=block_size):
                if not self._machine.has_live(peer):
                    client.live_since = now
                if now - client.proved_at >= self._timing.heartbeat_seconds:
                    self._ask(client, now)
                error = block_error(blocks, block_size, client.card)
                self.tell(key, RegisterReceived(peer, message, error), now)
            case Cancel(key, attempt, reason):
                self.tell(key, CancelReceived(peer, attempt, reason), now)
            case Done(key, attempt):
                self.tell(key, DoneReceived(peer, attempt), now)
            case _:
                if count := self._unsent.count(now):
                    text = "kvberth: a decode worker does not send %s; dropped (%d)"
                    _log.warning(text, type(message).__name__, count)

    def _probe(self, now: float) -> None:
        """Now, and some more times: but not whenever there is something to do, since each question is answered."""
        following = now + _PROBE_SECONDS / 10
        self._next_probe = following if following <= self._last_probe else None
        for client in self._clients.values():
            if client.gone_since is None and not self._ask(client, now):
                client.gone_since = now

    def _ask(self, client: Client, now: float) -> bool:
        """Whether it is there: what it sent may have been on the way for long, and its blocks be somebody else's.

        Returns:
            Whether the question could be sent.
        """
        return self._wire.send_to_client(client.route, encode(Heartbeat(stamp=now)))

    def _is_overdue(self, client: Client, now: float) -> bool:
        return now - client.silent_since >= self._timing.grant_seconds and self._machine.has_live(client.peer)

    def _is_proved(self, client: Client, now: float) -> bool:
        """Whether it still waits for what we write to it, however late it has heard of us."""
        return now - client.proved_at < self._timing.grant_seconds

    def _lose(self, client: Client, detail: str, now: float) -> None:
        """Stop posting, cut the connection so that what is in flight comes to an end, and forget the client."""
        is_live = self._machine.has_live(client.peer)
        level = logging.ERROR if is_live else logging.INFO
        _log.log(level, "kvberth: decode worker %s is lost: %s", client.card.engine_id, detail)
        del self._clients[client.peer]
        del self._peer_of_route[client.route]
        self._do(self._machine.lose_peer(client.peer, detail, now), now)
        disconnect(self._transport, client.agent, is_live=is_live)
        # Now, and not in turn: if it lives, what it registers next may name the same blocks.
        for landing in self._flights.cut_off(client.agent):
            self._landed(landing, now)

    def _landed(self, landing: Landing, now: float) -> None:
        moved = (landing.num_bytes, landing.num_descriptors)
        self.tell(landing.key, WritesFailed(landing.error) if landing.error else WritesDone(*moved), now)

    # Actions.

    def _do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case SendMessage(peer, message):
                    if isinstance(message, Accepted):
                        self._watchers.registered(message.key)
                    if (client := self._clients.get(peer)) is not None:
                        if isinstance(message, Ended) and message.reason is Reason.INVALID_BLOCKS:
                            self._log_refusal(client, message.detail, now)
                        self._wire.send_to_client(client.route, encode(message))
                case StartWrite():
                    self._start(action)
                case StopPosting(key):
                    self._flights.stop(key)
                case ReleaseRequest(request_id):
                    self._outbox.released(request_id)
                case EndRecord(key=key, end=end):
                    self._watchers.over(key, is_handed_over=end is End.COMPLETED)
                    report_end(action, self._flights, self._outbox)
                case StartRead() | ReportReceived():
                    raise AssertionError(f"a producer does not ask for {action}")

    def _log_refusal(self, client: Client, why: str, now: float) -> None:
        """Blocks that cannot be written to are a bug of the decode worker's, or worse."""
        if count := self._bad_blocks.count(now):
            name = client.card.engine_id
            _log.error("kvberth: refused a registration of decode worker %s (%d): %s", name, count, why)

    def _tell_router(self, route: bytes, message: Progress) -> None:
        self._wire.send_to_client(route, encode(message))

    def _start(self, action: StartWrite) -> None:
        client = self._clients[action.peer]
        plan = None
        if action.local_blocks:
            plan = partial(plan_transfer, self._card, client.card, action.local_blocks, action.remote_blocks)
        self._flights.extend(action.key, Direction.WRITE, client.agent, plan, is_last=action.is_last)
