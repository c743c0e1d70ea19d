"""Hypothesis walks two machines through an adversarial world and looks for blocks that are freed too early.

The world may deliver, drop, duplicate and reorder messages, let either side die and come back, end transfers well or
badly, preempt the prefill in mid-flight, and let time pass. Invariants: D's blocks are not given back while P has a
WRITE in flight, P's not while anything may touch them, what D is told has come is of one generation of P's blocks and
whole, each request is reported or released at most once, and once the world has calmed down every transfer has one end.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.protocol.pair import KEY, PRODUCER, Pair, waiting

from kvberth.protocol import (
    EndRecord,
    Reason,
    ReleaseRequest,
    ReportReceived,
    StartRead,
    StartWrite,
    StopPosting,
    Timing,
    TransferMode,
)
from kvberth.protocol.consumer_states import ConsumerState
from kvberth.protocol.events import PeerReady, RequestDeclined
from kvberth.protocol.producer_states import ProducerState


class World(RuleBasedStateMachine):
    """One transfer, two machines, a network that cannot be trusted."""

    @initialize(mode=st.sampled_from(TransferMode))
    def begin(self, mode: TransferMode) -> None:
        # Ends are never forgotten here; `test_handoff` has the promise that they are, after a while.
        self.pair = Pair(Timing(memory_seconds=1e9))
        self.mode = mode
        self.has_announced = self.has_finished = self.has_waited = False
        # A flight is open from its first WRITE to its landing, and may land when the last has been asked for.
        self.writing = self.reading = self.may_land = False
        self.generation = self.ready = self.seen = 0
        self.completed_generation = -1
        self.landed: dict[int, int] = {}

    # Engines.

    @precondition(lambda self: not self.has_announced)
    @rule()
    def announce(self) -> None:
        self.has_announced = True
        self.pair.announce()

    @precondition(lambda self: self.has_announced and not self.has_finished and self.ready < 3)
    @rule(count=st.integers(1, 3))
    def advance_prefill(self, count: int) -> None:
        """Some of the three blocks are ready, perhaps the last ones; each generation has blocks of its own."""
        end = min(3, self.ready + count)
        blocks = [10 * self.generation + index + 1 for index in range(self.ready, end)]
        self.pair.advance_prefill(self.ready, *blocks, is_complete=end == 3)
        self.ready = end

    @precondition(lambda self: self.has_announced and not self.has_finished)
    @rule()
    def preempt_prefill(self) -> None:
        """The blocks are somebody else's from now on, in mid-flight as well."""
        self.generation += 1
        self.ready = 0
        self.pair.restart_prefill()

    @precondition(lambda self: self.has_announced and not self.has_finished)
    @rule(is_complete=st.booleans())
    def end_prefill(self, is_complete: bool) -> None:
        self.has_finished = True
        if is_complete:
            self.pair.finish_prefill(tuple(10 * self.generation + index + 1 for index in range(3)))
        else:
            self.pair.abort_prefill()

    @precondition(lambda self: not self.has_waited)
    @rule()
    def wait(self) -> None:
        self.has_waited = True
        self.pair.wait(waiting(self.mode))

    @precondition(lambda self: self.pair.consumer.state(KEY) not in {None, ConsumerState.ENDED})
    @rule()
    def abort_request(self) -> None:
        self.pair.abort_request()

    @precondition(lambda self: self.pair.consumer.state(KEY) not in {None, ConsumerState.ENDED})
    @rule()
    def decline_again(self) -> None:
        self.pair._consume(RequestDeclined(0, Reason.CONSUMER_GONE))

    # Transport.

    @precondition(lambda self: self.writing and self.may_land)
    @rule()
    def end_writes(self) -> None:
        self.writing = self.may_land = False
        self.completed_generation = self.generation
        self.pair.writes_done()

    @precondition(lambda self: self.writing)
    @rule()
    def fail_writes(self) -> None:
        self.writing = self.may_land = False
        self.pair.writes_fail()

    @precondition(lambda self: self.reading)
    @rule(is_ok=st.booleans())
    def end_reads(self, is_ok: bool) -> None:
        self.reading = False
        if is_ok:
            self.pair.reads_done()
        else:
            self.pair.reads_fail()

    # Network and clock.

    @rule(choice=st.sampled_from(["deliver", "drop", "duplicate", "delay"]))
    def to_producer(self, choice: str) -> None:
        if self.pair.to_producer and choice == "duplicate":
            self.pair.to_producer.append(self.pair.to_producer[0])
        if choice == "delay":
            self.pair.to_producer = self.pair.to_producer[1:] + self.pair.to_producer[:1]
        elif choice == "drop":
            del self.pair.to_producer[:1]
        else:
            rest, self.pair.to_producer = self.pair.to_producer[1:], self.pair.to_producer[:1]
            self.pair.deliver_to_producer()
            self.pair.to_producer = rest + self.pair.to_producer

    @rule(choice=st.sampled_from(["deliver", "drop", "duplicate", "delay"]))
    def to_consumer(self, choice: str) -> None:
        if self.pair.to_consumer and choice == "duplicate":
            self.pair.to_consumer.append(self.pair.to_consumer[0])
        if choice == "delay":
            self.pair.to_consumer = self.pair.to_consumer[1:] + self.pair.to_consumer[:1]
        elif choice == "drop":
            del self.pair.to_consumer[:1]
        else:
            rest, self.pair.to_consumer = self.pair.to_consumer[1:], self.pair.to_consumer[:1]
            self.pair.deliver_to_consumer()
            self.pair.to_consumer = rest + self.pair.to_consumer

    @rule(seconds=st.sampled_from([0.1, 1.5, 11.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.pair.pass_time(seconds)

    @rule()
    def heartbeat(self) -> None:
        self.pair.heartbeat()

    @rule()
    def lose_producer(self) -> None:
        """D cuts P off, which ends P's WRITEs before D's machine is told; then P hears that D is gone."""
        if self.writing:
            self.fail_writes()
            self.nothing_is_freed_while_it_can_be_touched()
        if self.writing:  # it was drained to begin anew, and did
            self.fail_writes()
        self.pair.kill_producer()
        self.pair.to_consumer.clear()
        self.pair.kill_consumer()

    # Promises.

    @invariant()
    def nothing_is_freed_while_it_can_be_touched(self) -> None:
        for action in self.pair.log[self.seen :]:
            match action:
                case StartWrite(local_blocks=local, remote_blocks=remote, is_last=is_last):
                    assert not (self.writing and self.may_land), "posted behind the last"
                    self.writing, self.may_land = True, is_last
                    for mine, theirs in zip(local, remote, strict=True):
                        assert mine // 10 == self.generation, "a block was written that P has no more"
                        self.landed[theirs] = mine
                case StopPosting():
                    self.may_land = True
                case StartRead():
                    assert not self.reading
                    self.reading = True
                case ReportReceived(ok=ok):
                    if ok and self.mode is TransferMode.PUSH:
                        assert self.landed == {7 + index: self.landed[7] + index for index in range(3)}
                        assert self.landed[7] // 10 == self.completed_generation, "bytes of an earlier generation"
                    assert not self.writing, "D's blocks were given back under a WRITE"
                    assert not self.reading, "D's blocks were given back under a READ"
                case ReleaseRequest():
                    assert not self.writing, "P's blocks were released under its WRITE"
                    assert self.has_finished
        self.seen = len(self.pair.log)

    @invariant()
    def nothing_ends_twice(self) -> None:
        assert len(self.pair.released()) <= 1
        assert len(self.pair.received()) <= 1
        roles = [each.role for each in self.pair.log if isinstance(each, EndRecord)]
        assert len(roles) == len(set(roles))

    def teardown(self) -> None:
        """The world calms down: engines finish, transfers end, messages arrive."""
        if not hasattr(self, "pair"):
            return
        if self.has_announced and not self.has_finished:
            self.end_prefill(is_complete=True)
        for _ in range(4):
            if self.pair.consumer.state(KEY) is ConsumerState.WAITING:
                self.pair._consume(PeerReady(PRODUCER))
            self.pair.heartbeat().deliver()
            self.nothing_is_freed_while_it_can_be_touched()
            if self.writing and self.may_land:
                self.end_writes()
            if self.reading:
                self.end_reads(is_ok=True)
            self.pair.deliver().pass_time(31.0)
        assert self.pair.consumer.state(KEY) is None
        assert self.pair.producer.state(KEY) in {None, ProducerState.ENDED}
        assert len(self.pair.received()) == self.has_waited
        assert len(self.pair.released()) == self.has_announced


World.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
test_random_walks = World.TestCase
