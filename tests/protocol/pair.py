"""Two machines that talk to each other, one step at a time: the default way to test the protocol."""

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
CONSUMER = PeerName("D/0/a")
DIGEST = b"digest-of-prompt"


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
class Pair:
    """P and D with a channel between them that delivers when told to.

    Attributes:
        log: everything that the machines asked for, in order, messages included.
        to_producer, to_consumer: what is on the way.
    """

    timing: Timing = field(default_factory=Timing)
    now: float = 100.0
    step_began: float | None = None
    log: list[Action] = field(default_factory=list)
    to_producer: list[Message] = field(default_factory=list)
    to_consumer: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.producer = Producer(BLOCK_SIZE, self.timing)
        self.consumer = Consumer(BLOCK_SIZE, self.timing)

    # What the engines do.

    def announce(self, event: PrefillAnnounced | None = None) -> "Pair":
        return self._produce(event or announced())

    def advance_prefill(self, first: int, *blocks: int, is_complete: bool = False) -> "Pair":
        return self._produce(PrefillAdvanced(first, blocks, is_complete))

    def restart_prefill(self) -> "Pair":
        return self._produce(PrefillRestarted())

    def finish_prefill(self, blocks: tuple[int, ...] = (1, 2, 3)) -> "Pair":
        return self._produce(PrefillFinished(blocks))

    def abort_prefill(self) -> "Pair":
        return self._produce(PrefillAborted())

    def wait(self, event: RequestWaiting | None = None) -> "Pair":
        self._consume(event or waiting())
        return self._consume(PeerReady(PRODUCER))

    def decline(self, reason: Reason = Reason.NOT_NEEDED) -> "Pair":
        self._consume(RequestDeclined(0, reason))
        return self._consume(PeerReady(PRODUCER))

    def abort_request(self) -> "Pair":
        return self._consume(RequestAborted())

    # What the transport does.

    def writes_done(self) -> "Pair":
        return self._produce(WritesDone(300, 3))

    def writes_fail(self) -> "Pair":
        return self._produce(WritesFailed("link down"))

    def reads_done(self) -> "Pair":
        return self._consume(ReadsDone(300, 3))

    def reads_fail(self) -> "Pair":
        return self._consume(ReadsFailed("link down"))

    # What the network, the clock and death do.

    def deliver(self) -> "Pair":
        """Deliver everything, and what is sent in answer, until nothing is on the way."""
        while self.to_producer or self.to_consumer:
            self.deliver_to_producer()
            self.deliver_to_consumer()
        return self

    def deliver_to_producer(self) -> "Pair":
        taken, self.to_producer = self.to_producer, []
        for message in taken:
            match message:
                case Register():
                    self._produce(RegisterReceived(CONSUMER, message))
                case Cancel(_, attempt, reason):
                    self._produce(CancelReceived(CONSUMER, attempt, reason))
                case Done(_, attempt):
                    self._produce(DoneReceived(CONSUMER, attempt))
                case Heartbeat(live):
                    self._apply(self.producer.heard_live(CONSUMER, live, self.now))
                case _:
                    raise AssertionError(f"not for a producer: {message}")
        return self

    def deliver_to_consumer(self) -> "Pair":
        taken, self.to_consumer = self.to_consumer, []
        for message in taken:
            self._consume(message)
        return self

    def heartbeat(self) -> "Pair":
        """D's heartbeat takes its place behind what D has sent before: the channel keeps the order."""
        self.to_producer.append(Heartbeat(self.consumer.live_with(PRODUCER)))
        self._apply(self.consumer.repeat_cancels(PRODUCER))
        return self

    def pass_time(self, seconds: float) -> "Pair":
        self.now += seconds
        self._apply(self.producer.fire(self.now, self.now if self.step_began is None else self.step_began))
        self._apply(self.consumer.fire(self.now))
        return self

    def give_up(self) -> "Pair":
        """Nobody takes over from a consumer that is gone."""
        return self.pass_time(self.timing.rebind_seconds)

    def kill_consumer(self) -> "Pair":
        self.to_consumer.clear()
        self._apply(self.producer.lose_peer(CONSUMER, "connection reset", self.now))
        return self

    def kill_producer(self) -> "Pair":
        self.to_producer.clear()
        self._apply(self.consumer.lose_peer(PRODUCER, "connection reset", self.now))
        return self

    # What a test asks.

    def ends(self) -> list[tuple[str, End, Reason]]:
        """(role, end, reason) of every end so far."""
        return [(str(each.role), each.end, each.reason) for each in self.log if isinstance(each, EndRecord)]

    def released(self) -> list[str]:
        """P's requests whose blocks were let go of, in order."""
        return [each.request_id for each in self.log if isinstance(each, ReleaseRequest)]

    def received(self) -> list[tuple[str, bool]]:
        """D's requests whose wait is over, and whether well."""
        return [(each.request_id, each.ok) for each in self.log if isinstance(each, ReportReceived)]

    def reports(self) -> list[ReportReceived]:
        """The same in full."""
        return [each for each in self.log if isinstance(each, ReportReceived)]

    def started(self) -> list[Action]:
        """Transfers that were started or stopped."""
        return [each for each in self.log if isinstance(each, StartWrite | StartRead | StopPosting)]

    def _produce(self, event: object) -> "Pair":
        self._apply(self.producer.handle(KEY, event, self.now))  # type: ignore[arg-type]
        return self

    def _consume(self, event: object) -> "Pair":
        self._apply(self.consumer.handle(KEY, event, self.now))  # type: ignore[arg-type]
        return self

    def _apply(self, actions: list[Action]) -> None:
        self.log += actions
        for action in actions:
            if isinstance(action, SendMessage) and action.peer == CONSUMER:
                self.to_consumer.append(action.message)
            elif isinstance(action, SendMessage) and action.peer == PRODUCER:
                self.to_producer.append(action.message)
