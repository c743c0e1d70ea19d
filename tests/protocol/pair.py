"""Machines that talk to each other, one step at a time: the default way to test the protocol."""

from dataclasses import dataclass, field

from kvberth.protocol import (
    Action,
    Consumer,
    End,
    EndRecord,
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
    TransferMode,
)
from kvberth.protocol.events import (
    CancelReceived,
    DoneReceived,
    PeerReady,
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    ReadsDone,
    ReadsFailed,
    RegisterReceived,
    RequestAborted,
    RequestDeclined,
    RequestWaiting,
    WritesDone,
    WritesFailed,
)
from kvberth.protocol.ids import PeerName, RequestId
from kvberth.protocol.messages import Cancel, Done, Heartbeat, Message, Register

BLOCK_SIZE = 16
KEY = TransferKey("t-1")
PRODUCER = PeerName("P/0/a")
DIGEST = b"digest-of-prompt"


def name(number: int) -> PeerName:
    """A decode worker's."""
    return PeerName(f"D{number}/0/a")


def number_of(peer: PeerName) -> int:
    return int(peer[1 : peer.index("/")])


CONSUMER = name(0)


def announced(request: str = "p-1", num_tokens: int = 40, digest: bytes = DIGEST) -> PrefillAnnounced:
    """A request of 40 tokens, three blocks of 16, arrives at P."""
    return PrefillAnnounced(RequestId(request), num_tokens, digest)


def waiting(
    mode: TransferMode = TransferMode.PUSH,
    *,
    attempt: int = 0,
    first_token: int = 0,
    num_tokens: int = 40,
    digest: bytes = DIGEST,
    blocks: tuple[int, ...] = (7, 8, 9),
    request: str = "d-1",
) -> RequestWaiting:
    """The same request waits at D with its blocks reserved."""
    return RequestWaiting(RequestId(request), attempt, mode, first_token, num_tokens, digest, blocks)


def register(mode: TransferMode = TransferMode.PUSH, *, attempt: int = 0, **changes: object) -> Register:
    """The registration that follows from `waiting`."""
    values: dict[str, object] = {
        "key": KEY,
        "attempt": attempt,
        "mode": mode,
        "first_token": 0,
        "num_tokens": 40,
        "prompt_digest": DIGEST,
        "block_size": BLOCK_SIZE,
        "blocks": (7, 8, 9) if mode is TransferMode.PUSH else (),
    }
    return Register(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Site:
    """P, decode workers D0, D1, ... and a channel that delivers when told to.

    Attributes:
        step_began: when P's engine began the step that it is in.
        log: (who, action), everything that the machines asked for, in order, messages included; P is None.
        to_producer, to_consumers: (sender, message) and (receiver, message): what is on the way.
    """

    timing: Timing = field(default_factory=Timing)
    now: float = 100.0
    step_began: float | None = None
    consumers: list[Consumer] = field(default_factory=list)
    log: list[tuple[int | None, Action]] = field(default_factory=list)
    to_producer: list[tuple[int, Message]] = field(default_factory=list)
    to_consumers: list[tuple[int, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.producer = Producer(BLOCK_SIZE, self.timing)

    def produce(self, event: object) -> "Site":
        """Something happens on P."""
        self._apply(None, self.producer.handle(KEY, event, self.now))  # type: ignore[arg-type]
        return self

    def consume(self, number: int, event: object) -> "Site":
        """Something happens on a decode worker."""
        self._apply(number, self.consumers[number].handle(KEY, event, self.now))  # type: ignore[arg-type]
        return self

    def add(self) -> int:
        """One more decode worker; its number."""
        self.consumers.append(Consumer(BLOCK_SIZE, self.timing))
        return len(self.consumers) - 1

    def bind(self, mode: TransferMode = TransferMode.PUSH, digest: bytes = DIGEST) -> "Site":
        """The next decode worker registers three blocks of its own; its number is its attempt."""
        number = self.add()
        blocks = tuple(100 * (number + 1) + index for index in range(3))
        request = f"d-{number}"
        self.consume(number, waiting(mode, attempt=number, digest=digest, blocks=blocks, request=request))
        return self.consume(number, PeerReady(PRODUCER))

    def decline(self) -> "Site":
        """The next decode worker loses its request before it has reserved anything."""
        number = self.add()
        self.consume(number, RequestDeclined(number, Reason.CONSUMER_GONE))
        return self.consume(number, PeerReady(PRODUCER))

    def deliver(self) -> "Site":
        """Deliver everything, and what is sent in answer, until nothing is on the way."""
        while self.to_producer or self.to_consumers:
            self.deliver_to_producer().deliver_to_consumers()
        return self

    def deliver_to_producer(self) -> "Site":
        taken, self.to_producer[:] = list(self.to_producer), []
        for sender, message in taken:
            self.hear(sender, message)
        return self

    def deliver_to_consumers(self) -> "Site":
        taken, self.to_consumers[:] = list(self.to_consumers), []
        for receiver, message in taken:
            if receiver < len(self.consumers):
                self.consume(receiver, message)
        return self

    def hear(self, sender: int, message: Message) -> "Site":
        """P receives a message."""
        peer = name(sender)
        match message:
            case Register():
                return self.produce(RegisterReceived(peer, message))
            case Cancel(_, attempt, reason):
                return self.produce(CancelReceived(peer, attempt, reason))
            case Done(_, attempt):
                return self.produce(DoneReceived(peer, attempt))
            case Heartbeat(live):
                self._apply(None, self.producer.heard_live(peer, live, self.now))
                return self
        raise AssertionError(f"not for a producer: {message}")

    def heartbeat(self, number: int) -> "Site":
        """It takes its place behind what D has sent before: the channel keeps the order."""
        self.to_producer.append((number, Heartbeat(self.consumers[number].live_with(PRODUCER))))
        self._apply(number, self.consumers[number].repeat_cancels(PRODUCER))
        return self

    def pass_time(self, seconds: float) -> "Site":
        self.now += seconds
        self._apply(None, self.producer.fire(self.now, self.now if self.step_began is None else self.step_began))
        for number, consumer in enumerate(self.consumers):
            self._apply(number, consumer.fire(self.now))
        return self

    def lose(self, number: int) -> "Site":
        """A decode worker is gone for P."""
        self.to_consumers[:] = [each for each in self.to_consumers if each[0] != number]
        self._apply(None, self.producer.lose_peer(name(number), "connection reset", self.now))
        return self

    def lose_producer(self, number: int) -> "Site":
        """P is gone for a decode worker."""
        self.to_producer[:] = [each for each in self.to_producer if each[0] != number]
        self._apply(number, self.consumers[number].lose_peer(PRODUCER, "connection reset", self.now))
        return self

    def ends(self) -> list[tuple[int | None, End, Reason]]:
        """(who, end, reason) of every end so far."""
        return [(who, each.end, each.reason) for who, each in self.log if isinstance(each, EndRecord)]

    def received(self) -> list[tuple[int | None, bool]]:
        """Decode workers whose wait is over, and whether well."""
        return [(who, each.ok) for who, each in self.log if isinstance(each, ReportReceived)]

    def released(self) -> list[str]:
        """P's requests whose blocks were let go of, in order."""
        return [each.request_id for _, each in self.log if isinstance(each, ReleaseRequest)]

    def writes(self) -> list[tuple[PeerName, tuple[int, ...]]]:
        """To whom, and from which blocks."""
        return [(each.peer, each.local_blocks) for _, each in self.log if isinstance(each, StartWrite)]

    def _apply(self, who: int | None, actions: list[Action]) -> None:
        for action in actions:
            self.log.append((who, action))
            if isinstance(action, SendMessage) and who is None:
                self.to_consumers.append((number_of(action.peer), action.message))
            elif isinstance(action, SendMessage):
                assert who is not None
                self.to_producer.append((who, action.message))


class Pair:
    """A site with one decode worker, in words that name neither."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.site = Site(timing or Timing())
        self.site.add()

    @property
    def producer(self) -> Producer:
        return self.site.producer

    @property
    def consumer(self) -> Consumer:
        return self.site.consumers[0]

    @property
    def now(self) -> float:
        return self.site.now

    @property
    def to_producer(self) -> list[tuple[int, Message]]:
        return self.site.to_producer

    @property
    def to_consumer(self) -> list[tuple[int, Message]]:
        return self.site.to_consumers

    # What the engines do.

    def announce(self, event: PrefillAnnounced | None = None) -> "Pair":
        return self.produce(event or announced())

    def advance_prefill(self, first: int, *blocks: int, is_complete: bool = False) -> "Pair":
        return self.produce(PrefillAdvanced(first, blocks, is_complete))

    def restart_prefill(self) -> "Pair":
        return self.produce(PrefillRestarted())

    def finish_prefill(self, blocks: tuple[int, ...] = (1, 2, 3)) -> "Pair":
        return self.produce(PrefillFinished(blocks))

    def abort_prefill(self) -> "Pair":
        return self.produce(PrefillAborted())

    def wait(self, event: RequestWaiting | None = None) -> "Pair":
        return self.consume(event or waiting()).consume(PeerReady(PRODUCER))

    def decline(self, reason: Reason = Reason.NOT_NEEDED) -> "Pair":
        return self.consume(RequestDeclined(0, reason)).consume(PeerReady(PRODUCER))

    def abort_request(self) -> "Pair":
        return self.consume(RequestAborted())

    # What the transport does.

    def writes_done(self) -> "Pair":
        return self.produce(WritesDone(300, 3))

    def writes_fail(self) -> "Pair":
        return self.produce(WritesFailed("link down"))

    def reads_done(self) -> "Pair":
        return self.consume(ReadsDone(300, 3))

    def reads_fail(self) -> "Pair":
        return self.consume(ReadsFailed("link down"))

    # What the network, the clock and death do.

    def deliver(self) -> "Pair":
        self.site.deliver()
        return self

    def deliver_to_producer(self) -> "Pair":
        self.site.deliver_to_producer()
        return self

    def deliver_to_consumer(self) -> "Pair":
        self.site.deliver_to_consumers()
        return self

    def heartbeat(self) -> "Pair":
        self.site.heartbeat(0)
        return self

    def pass_time(self, seconds: float) -> "Pair":
        self.site.pass_time(seconds)
        return self

    def give_up(self) -> "Pair":
        """Nobody takes over from a consumer that is gone."""
        return self.pass_time(self.site.timing.rebind_seconds)

    def kill_consumer(self) -> "Pair":
        self.site.lose(0)
        return self

    def kill_producer(self) -> "Pair":
        self.site.lose_producer(0)
        return self

    # What a test asks.

    def actions(self) -> list[Action]:
        """Everything that the machines asked for, in order."""
        return [action for _, action in self.site.log]

    def ends(self) -> list[tuple[str, End, Reason]]:
        """(role, end, reason) of every end so far."""
        return [(str(each.role), each.end, each.reason) for each in self.actions() if isinstance(each, EndRecord)]

    def released(self) -> list[str]:
        return self.site.released()

    def received(self) -> list[tuple[str, bool]]:
        """D's requests whose wait is over, and whether well."""
        return [(each.request_id, each.ok) for each in self.actions() if isinstance(each, ReportReceived)]

    def reports(self) -> list[ReportReceived]:
        """The same in full."""
        return [each for each in self.actions() if isinstance(each, ReportReceived)]

    def started(self) -> list[Action]:
        """Transfers that were started or stopped."""
        return [each for each in self.actions() if isinstance(each, StartWrite | StartRead | StopPosting)]

    def produce(self, event: object) -> "Pair":
        self.site.produce(event)
        return self

    def consume(self, event: object) -> "Pair":
        self.site.consume(0, event)
        return self
