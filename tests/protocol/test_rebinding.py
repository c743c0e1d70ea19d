"""One producer, several consumers: a decode worker can be chosen again until the bytes have landed."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.protocol.pair import BLOCK_SIZE, DIGEST, KEY, PRODUCER, announced

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
    TransferMode,
)
from kvberth.protocol.events import (
    CancelReceived,
    DoneReceived,
    PeerReady,
    PrefillAborted,
    PrefillAdvanced,
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
from kvberth.protocol.producer_states import ProducerState

PUSH, PULL = TransferMode.PUSH, TransferMode.PULL


@dataclass
class Site:
    """P, and decode workers D0, D1, ... whose number is their attempt.

    Attributes:
        to_producer: (sender, message), to_consumers: (receiver, message): what is on the way.
        log: (who, action); P is None.
    """

    now: float = 100.0
    consumers: list[Consumer] = field(default_factory=list)
    to_producer: list[tuple[int, Message]] = field(default_factory=list)
    to_consumers: list[tuple[int, Message]] = field(default_factory=list)
    log: list[tuple[int | None, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timing = Timing(memory_seconds=1e9)
        self.producer = Producer(BLOCK_SIZE, self.timing)

    def produce(self, event: object) -> "Site":
        self._apply(None, self.producer.handle(KEY, event, self.now))  # type: ignore[arg-type]
        return self

    def consume(self, number: int, event: object) -> "Site":
        self._apply(number, self.consumers[number].handle(KEY, event, self.now))  # type: ignore[arg-type]
        return self

    def bind(self, mode: TransferMode = PUSH) -> "Site":
        """The next decode worker registers three blocks of its own."""
        number = len(self.consumers)
        self.consumers.append(Consumer(BLOCK_SIZE, self.timing))
        blocks = tuple(100 * (number + 1) + index for index in range(3))
        request = RequestId(f"d-{number}")
        self.consume(number, RequestWaiting(request, number, mode, 0, 40, DIGEST, blocks))
        return self.consume(number, PeerReady(PRODUCER))

    def decline(self) -> "Site":
        """The next decode worker loses its request before it has reserved anything."""
        number = len(self.consumers)
        self.consumers.append(Consumer(BLOCK_SIZE, self.timing))
        self.consume(number, RequestDeclined(number, Reason.CONSUMER_GONE))
        return self.consume(number, PeerReady(PRODUCER))

    def deliver(self) -> "Site":
        while self.to_producer or self.to_consumers:
            if self.to_producer:
                self.hear(*self.to_producer.pop(0))
            if self.to_consumers:
                self.consume(*self.to_consumers.pop(0))
        return self

    def hear(self, sender: int, message: Message) -> "Site":
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
        self.to_producer.append((number, Heartbeat(self.consumers[number].live_with(PRODUCER))))
        self._apply(number, self.consumers[number].repeat_cancels(PRODUCER))
        return self

    def pass_time(self, seconds: float) -> "Site":
        self.now += seconds
        self._apply(None, self.producer.fire(self.now, self.now))
        for number, consumer in enumerate(self.consumers):
            self._apply(number, consumer.fire(self.now))
        return self

    def lose(self, number: int) -> "Site":
        """A decode worker is gone for P, and P for it."""
        self.to_producer = [each for each in self.to_producer if each[0] != number]
        self.to_consumers = [each for each in self.to_consumers if each[0] != number]
        self._apply(None, self.producer.lose_peer(name(number), "reset", self.now))
        return self

    def ends(self) -> list[tuple[int | None, End, Reason]]:
        return [(who, each.end, each.reason) for who, each in self.log if isinstance(each, EndRecord)]

    def received(self) -> list[tuple[int | None, bool]]:
        return [(who, each.ok) for who, each in self.log if isinstance(each, ReportReceived)]

    def released(self) -> int:
        return sum(isinstance(each, ReleaseRequest) for _, each in self.log)

    def writes(self) -> list[tuple[PeerName, tuple[int, ...]]]:
        return [(each.peer, each.local_blocks) for _, each in self.log if isinstance(each, StartWrite)]

    def _apply(self, who: int | None, actions: list[Action]) -> None:
        for action in actions:
            self.log.append((who, action))
            if isinstance(action, SendMessage) and who is None:
                self.to_consumers.append((number_of(action.peer), action.message))
            elif isinstance(action, SendMessage):
                assert who is not None
                self.to_producer.append((who, action.message))


def name(number: int) -> PeerName:
    return PeerName(f"D{number}/0/a")


def number_of(peer: PeerName) -> int:
    return int(peer[1 : peer.index("/")])


def streaming() -> Site:
    """One block of three is on its way to D0."""
    return Site().produce(announced()).bind().deliver().produce(PrefillAdvanced(0, (1,), False)).deliver()


def test_a_newer_attempt_takes_over_in_mid_stream():
    """The first one hears it when nothing of it is in flight; the second gets everything from the first block on."""
    site = streaming().bind().deliver()
    assert site.received() == []
    assert site.writes() == [(name(0), (1,))]
    site.produce(PrefillAdvanced(1, (2,), False)).produce(WritesDone(1, 1)).deliver()
    assert site.received() == [(0, False)]
    assert (0, End.SUPERSEDED, Reason.NEWER_ATTEMPT) in site.ends()
    assert site.writes()[1:] == [(name(1), (1, 2))]
    site.produce(PrefillAdvanced(2, (3,), True)).produce(WritesDone(3, 3)).deliver()
    assert site.received()[1:] == [(1, True)]
    site.produce(PrefillFinished((1, 2, 3)))
    assert site.released() == 1
    assert [end for who, end, _ in site.ends() if who is None] == [End.COMPLETED]


def test_a_newer_attempt_takes_over_while_the_last_bytes_fly():
    """P's engine is done; P keeps the blocks until one attempt has completed."""
    site = streaming().produce(PrefillFinished((1, 2, 3))).bind().deliver().produce(WritesDone(3, 3)).deliver()
    assert site.received() == [(0, False)]
    assert site.released() == 0
    site.produce(WritesDone(3, 3)).deliver()
    assert site.received() == [(0, False), (1, True)]
    assert site.released() == 1


@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_a_newer_attempt_takes_over_from_a_reader(mode):
    """It is asked to stop, and P waits until it has."""
    site = Site().produce(announced()).produce(PrefillFinished((1, 2, 3))).bind(PULL).deliver().bind(mode).deliver()
    assert site.received() == []
    assert site.writes() == []
    site.consume(0, ReadsDone(1, 1)).deliver()
    assert site.received() == [(0, False)]
    if mode is PUSH:
        site.produce(WritesDone(3, 3))
    else:
        site.consume(1, ReadsDone(3, 3))
    site.deliver()
    assert site.received() == [(0, False), (1, True)]
    assert site.released() == 1


def test_the_newest_of_several_wins():
    """Whoever waited in between hears it at once."""
    site = streaming().bind().deliver().bind().deliver()
    assert site.received() == [(1, False)]
    site.produce(WritesDone(1, 1)).deliver()
    assert site.received() == [(1, False), (0, False)]
    assert site.writes()[-1] == (name(2), (1,))


def test_an_older_attempt_that_comes_late_is_superseded():
    """Messages overtake each other."""
    site = Site().produce(announced()).bind()
    late = site.to_producer.pop()
    site.bind().deliver().hear(*late).deliver()
    assert site.received() == [(0, False)]
    assert (0, End.SUPERSEDED, Reason.NEWER_ATTEMPT) in site.ends()


@pytest.mark.parametrize("how", ["abort", "death", "decline"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_another_decode_worker_can_come_after_the_first_is_gone(how, is_finished):
    """P keeps the blocks for a while, though nobody is registered."""
    site = Site().produce(announced())
    if how == "decline":
        site.decline().deliver()
    else:
        site.bind().deliver()
    if how == "abort":
        site.consume(0, RequestAborted()).deliver()
    elif how == "death":
        site.lose(0)
    if is_finished:
        site.produce(PrefillFinished((1, 2, 3)))
    site.pass_time(1.0).bind().deliver()
    if not is_finished:
        site.produce(PrefillFinished((1, 2, 3)))
    site.produce(WritesDone(3, 3)).deliver()
    assert site.received()[-1] == (1, True)
    assert site.released() == 1


@pytest.mark.parametrize(("how", "end"), [("abort", End.CANCELLED), ("death", End.FAILED), ("decline", End.CANCELLED)])
def test_if_nobody_comes_the_blocks_are_free_soon(how, end):
    """And the transfer ends as its last attempt did."""
    site = Site().produce(announced())
    if how == "decline":
        site.decline().deliver()
    else:
        site.bind().deliver()
    if how == "abort":
        site.consume(0, RequestAborted()).deliver()
    elif how == "death":
        site.lose(0)
    site.pass_time(60.0).produce(PrefillFinished((1, 2, 3)))
    assert site.released() == 0
    site.pass_time(site.timing.rebind_seconds)
    assert site.released() == 1
    assert [each for who, each, _ in site.ends() if who is None] == [end]


def test_given_up_before_the_producer_has_the_request():
    """It comes, and is not held for the whole lease."""
    site = Site().decline().deliver().produce(announced()).produce(PrefillFinished((1, 2, 3)))
    site.pass_time(site.timing.rebind_seconds)
    assert site.released() == 1


def test_a_registration_that_was_cancelled_is_never_written_to():
    """Its `Register` comes again behind its `Cancel`; D has given the blocks to others."""
    site = Site().produce(announced()).bind()
    late = site.to_producer[-1]
    site.deliver().consume(0, RequestAborted()).deliver()
    assert site.received() == [(0, False)]
    site.hear(*late).produce(PrefillFinished((1, 2, 3))).deliver()
    assert site.writes() == []


def test_a_refused_newcomer_leaves_the_older_attempt_alone():
    """Its registration is for another prompt."""
    site = streaming()
    site.consumers.append(Consumer(BLOCK_SIZE, site.timing))
    site.consume(1, RequestWaiting(RequestId("d-1"), 1, PUSH, 0, 40, b"another", (4, 5, 6)))
    site.consume(1, PeerReady(PRODUCER)).deliver()
    assert site.received() == [(1, False)]
    site.produce(PrefillFinished((1, 2, 3))).produce(WritesDone(3, 3)).deliver()
    assert site.received() == [(1, False), (0, True)]


def test_aborted_while_one_waits_to_take_over():
    """Both hear it: there will be no KV."""
    site = streaming().bind().deliver().produce(PrefillAborted()).produce(WritesDone(1, 1)).deliver()
    assert sorted(site.received()) == [(0, False), (1, False)]
    assert site.released() == 1


class World(RuleBasedStateMachine):
    """Up to three attempts, one after another or on top of each other, and a network that cannot be trusted."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Site()
        self.has_announced = self.has_finished = False
        self.generation = self.ready = self.seen = 0
        self.target: int | None = None
        self.may_land = False
        self.readers: set[int] = set()
        self.lost: set[int] = set()
        self.landed: dict[int, int] = {}

    # Engines.

    @precondition(lambda self: not self.has_announced)
    @rule()
    def announce(self) -> None:
        self.has_announced = True
        self.site.produce(announced())

    @precondition(lambda self: self.has_announced and not self.has_finished and self.ready < 3)
    @rule(count=st.integers(1, 3))
    def advance(self, count: int) -> None:
        end = min(3, self.ready + count)
        blocks = tuple(10 * self.generation + index + 1 for index in range(self.ready, end))
        self.site.produce(PrefillAdvanced(self.ready, blocks, end == 3))
        self.ready = end

    @precondition(lambda self: self.has_announced and not self.has_finished)
    @rule()
    def preempt(self) -> None:
        self.generation += 1
        self.ready = 0
        self.site.produce(PrefillRestarted())

    @precondition(lambda self: self.has_announced and not self.has_finished)
    @rule(is_complete=st.booleans())
    def finish(self, is_complete: bool) -> None:
        self.has_finished = True
        blocks = tuple(10 * self.generation + index + 1 for index in range(3))
        self.site.produce(PrefillFinished(blocks) if is_complete else PrefillAborted())

    @precondition(lambda self: len(self.site.consumers) < 3)
    @rule(mode=st.sampled_from(TransferMode))
    def bind(self, mode: TransferMode) -> None:
        self.site.bind(mode)

    @precondition(lambda self: len(self.site.consumers) < 3)
    @rule()
    def decline(self) -> None:
        self.site.decline()

    @precondition(lambda self: self.site.consumers)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = self._choose(data)
        if self.site.consumers[number].state(KEY) is not None:
            self.site.consume(number, RequestAborted())

    # Transport.

    @precondition(lambda self: self.target is not None and self.may_land)
    @rule()
    def land(self) -> None:
        self.target, self.may_land = None, False
        self.site.produce(WritesDone(3, 3))

    @precondition(lambda self: self.target is not None)
    @rule()
    def fail(self) -> None:
        self.target, self.may_land = None, False
        self.site.produce(WritesFailed("link down"))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), is_ok=st.booleans())
    def end_reads(self, data: st.DataObject, is_ok: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.readers)))
        self.readers.discard(number)
        self.site.consume(number, ReadsDone(3, 3) if is_ok else ReadsFailed("link down"))

    # Network and clock.

    @rule(data=st.data(), choice=st.sampled_from(["deliver", "deliver", "drop", "duplicate"]))
    def to_producer(self, data: st.DataObject, choice: str) -> None:
        if not self.site.to_producer:
            return
        at = data.draw(st.integers(0, len(self.site.to_producer) - 1))
        sender, message = self.site.to_producer[at] if choice == "duplicate" else self.site.to_producer.pop(at)
        if choice != "drop" and sender not in self.lost:
            self.site.hear(sender, message)

    @rule(data=st.data(), choice=st.sampled_from(["deliver", "deliver", "drop", "duplicate"]))
    def to_consumers(self, data: st.DataObject, choice: str) -> None:
        if not self.site.to_consumers:
            return
        at = data.draw(st.integers(0, len(self.site.to_consumers) - 1))
        receiver, message = self.site.to_consumers[at] if choice == "duplicate" else self.site.to_consumers.pop(at)
        if choice != "drop" and receiver not in self.lost:
            self.site.consume(receiver, message)

    @rule(seconds=st.sampled_from([0.1, 1.5, 2.5, 11.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.site.pass_time(seconds)

    @precondition(lambda self: self.site.consumers)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.site.heartbeat(self._choose(data))

    @precondition(lambda self: self.site.consumers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A decode worker dies, and whatever it reads with it; P's WRITEs to it end when P cuts it off."""
        number = self._choose(data)
        self.lost.add(number)
        self.readers.discard(number)
        self.site.lose(number)
        self.promises()
        if self.target == number:
            self.may_land = True

    def _choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.site.consumers) - 1))

    # Promises.

    @invariant()
    def promises(self) -> None:
        for who, action in self.site.log[self.seen :]:
            match action:
                case StartWrite(peer=peer, local_blocks=local, remote_blocks=remote, is_last=is_last):
                    number = number_of(peer)
                    assert self.target in {None, number}, "two attempts are written to at once"
                    assert not (self.target is not None and self.may_land), "posted behind the last"
                    reported = {each for each, _ in self.site.received()}
                    assert number not in reported, "written to blocks that were given back"
                    self.target, self.may_land = number, is_last
                    for mine, theirs in zip(local, remote, strict=True):
                        assert mine // 10 == self.generation
                        self.landed[theirs] = mine
                case StopPosting() if who is None:
                    self.may_land = True
                case StartRead():
                    assert who is not None
                    self.readers.add(who)
                case ReportReceived(ok=ok):
                    assert who is not None
                    assert self.target != who, "D's blocks were given back under a WRITE"
                    assert who not in self.readers, "D's blocks were given back under a READ"
                    if ok and self.landed.get(100 * (who + 1)) is not None:
                        first = self.landed[100 * (who + 1)]
                        assert [self.landed.get(100 * (who + 1) + index) for index in range(3)] == [
                            first + index for index in range(3)
                        ]
                case ReleaseRequest():
                    assert self.target is None, "P's blocks were released under its WRITE"
                    assert self.has_finished
        self.seen = len(self.site.log)
        owners = [who for who, each in self.site.log if isinstance(each, EndRecord)]
        assert len(owners) == len(set(owners))
        assert len(self.site.received()) == len({who for who, _ in self.site.received()})
        assert self.site.released() <= 1

    def teardown(self) -> None:
        """The world calms down."""
        if self.has_announced and not self.has_finished:
            self.finish(is_complete=True)
        for _ in range(8):
            self.promises()
            for number in range(len(self.site.consumers)):
                if number not in self.lost:
                    self.site.heartbeat(number)
            self.site.to_consumers = [each for each in self.site.to_consumers if each[0] not in self.lost]
            self.site.to_producer = [each for each in self.site.to_producer if each[0] not in self.lost]
            self.site.deliver()
            self.promises()
            if self.target is not None and self.may_land:
                self.land()
            for number in sorted(self.readers):
                self.readers.discard(number)
                self.site.consume(number, ReadsDone(3, 3))
            self.site.deliver().pass_time(31.0)
        self.promises()
        assert self.site.producer.state(KEY) in {None, ProducerState.ENDED}
        assert self.site.released() == self.has_announced
        for number, consumer in enumerate(self.site.consumers):
            assert number in self.lost or consumer.state(KEY) is None


World.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_random_walks = World.TestCase
