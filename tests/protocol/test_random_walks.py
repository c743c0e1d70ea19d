"""Hypothesis walks one producer and three consumers through an adversarial world, and looks for broken promises.

What may happen: engines announce, compute, preempt, finish and abort; decode workers bind, decline and abort, in push
and in pull, with and without a prefix of their own, up to three attempts of each of three transfers in any order;
frames are delayed, dropped, doubled and overtake each other; bytes land late or fail; processes stop, wake, die and
come back; and time passes, with or without a network.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.protocol.engines import CONSUMERS, KEYS, TRANSFERS, Connection, Prefill, Rank, Wait
from tests.protocol.world import ATTEMPTS, World

from kvberth.mover import flights
from kvberth.protocol import Reason, TransferMode
from kvberth.protocol.ids import TransferKey

EXAMPLES = int(os.environ.get("KVBERTH_SOAK_EXAMPLES", "0"))
"""Walks of `make soak-protocol`; 0 for the few that belong to every run of the tests."""

STEPS = 60 if EXAMPLES else 40

PICKS = st.integers(0, 11)

ROUNDS = st.sampled_from([None, 1, 2, 3])
"""How much is delivered: all, or a little, and the rest is held up."""

FAULTS = ("breaks", "declines", "frames", "processes", "silence", "waits")
"""Kinds of trouble; each walk has some of them, since a walk with all of them comes to nothing."""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each block is a post of its own; and what goes wrong here, on purpose and often, is not logged."""
    monkeypatch.setattr(flights, "_BATCH_DESCRIPTORS", 1)
    logger = logging.getLogger("kvberth")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


class Walk(RuleBasedStateMachine):
    """Each rule is one step; what it applies to is picked from what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.faults: frozenset[str] = frozenset()

    @initialize(faults=st.frozensets(st.sampled_from(FAULTS)))
    def begin(self, faults: frozenset[str]) -> None:
        self.faults = faults

    # What there is to pick from.

    def prefills(self) -> list[Prefill]:
        """On the producer, and not over."""
        return [each for each in self.world.producer.prefills.values() if not each.is_over]

    def consumers(self) -> list[Rank]:
        return [self.world.ranks[name] for name in CONSUMERS if self.world.ranks[name].is_awake]

    def connections(self) -> list[Connection]:
        return [each for each in self.world.connections if each.is_open and each.rank.is_awake]

    def waits(self) -> list[tuple[Rank, Wait]]:
        return [
            (rank, wait)
            for rank in self.consumers()
            for wait in rank.waits.values()
            if not (wait.is_over or wait.is_aborted)
        ]

    def unannounced(self) -> list[str]:
        there = {each.transfer for each in self.world.producer.prefills.values()}
        return [each for each in TRANSFERS if each not in there]

    def unbound(self) -> list[tuple[TransferKey, int]]:
        return [
            (key, attempt) for key in KEYS for attempt in range(ATTEMPTS) if attempt not in self.world.attempts[key]
        ]

    def towards_producer(self) -> list[Connection]:
        is_up = self.world.producer.is_awake
        return [each for each in self.world.connections if each.to_producer and is_up]

    def towards_consumers(self) -> list[Connection]:
        return [each for each in self.world.connections if each.to_consumer and each.rank.is_awake]

    # The producer's engine.

    @precondition(lambda self: self.world.producer.is_awake and self.unannounced())
    @rule(pick=PICKS)
    def announce(self, pick: int) -> None:
        self.world.announce(_pick(self.unannounced(), pick))

    @precondition(lambda self: self.world.producer.is_awake and self.prefills())
    @rule(pick=PICKS, count=st.integers(1, 3), is_computed=st.booleans())
    def advance(self, pick: int, count: int, is_computed: bool) -> None:
        prefill = _pick(self.prefills(), pick)
        if prefill.num_told < len(prefill.blocks):
            self.world.advance(prefill, count, is_computed=is_computed)

    @precondition(lambda self: self.world.producer.is_awake and self.world.producer.gates)
    @rule()
    def compute(self) -> None:
        self.world.compute()

    @precondition(lambda self: self.world.producer.is_awake and self.prefills())
    @rule(pick=PICKS)
    def preempt(self, pick: int) -> None:
        self.world.preempt(_pick(self.prefills(), pick))

    @precondition(lambda self: self.world.producer.is_awake and self.prefills())
    @rule(pick=PICKS, is_complete=st.booleans())
    def finish(self, pick: int, is_complete: bool) -> None:
        self.world.finish(_pick(self.prefills(), pick), is_complete=is_complete)

    @precondition(lambda self: "waits" in self.faults and self.world.producer.is_awake)
    @rule(is_in_step=st.booleans())
    def step(self, is_in_step: bool) -> None:
        """While the engine computes a step it takes in no requests."""
        self.world.producer.step_began = self.world.now if is_in_step else None

    @precondition(lambda self: self.world.producer.is_awake and self.consumers() and self.unbound())
    @rule(rank=PICKS, pick=PICKS, mode=st.sampled_from(TransferMode), first=st.integers(0, 2), rounds=ROUNDS)
    def meet(self, rank: int, pick: int, mode: TransferMode, first: int, rounds: int | None) -> None:
        """A request on both sides, and little in the way: what `announce`, `bind` and `deliver` seldom come to."""
        key, _ = _pick(self.unbound(), pick)
        if key.transfer_id in self.unannounced():
            self.world.announce(key.transfer_id)
        self.bind(rank, pick, mode, first)
        self.world.deliver(rounds)

    @precondition(lambda self: "silence" in self.faults and self.consumers() and self.unbound())
    @rule(rank=PICKS, pick=PICKS, mode=st.sampled_from(TransferMode), rounds=ROUNDS)
    def part(self, rank: int, pick: int, mode: TransferMode, rounds: int | None) -> None:
        """The network is gone just when a request has come, for long enough that somebody gives up."""
        self.meet(rank, pick, mode, 0, rounds)
        self.world.pass_time(3.25, is_connected=False)

    # The consumers' engines.

    @precondition(lambda self: self.consumers() and self.unbound())
    @rule(rank=PICKS, pick=PICKS, mode=st.sampled_from(TransferMode), first=st.integers(0, 3))
    def bind(self, rank: int, pick: int, mode: TransferMode, first: int) -> None:
        consumer, (key, attempt) = _pick(self.consumers(), rank), _pick(self.unbound(), pick)
        if TRANSFERS[key.transfer_id] % 16 and first == 3:
            first = 2
        if not consumer.is_live(key):
            self.world.bind(consumer, key, attempt, mode, first)

    @precondition(lambda self: "declines" in self.faults and self.consumers() and self.unbound())
    @rule(rank=PICKS, pick=PICKS, reason=st.sampled_from([Reason.NOT_NEEDED, Reason.CONSUMER_GONE]))
    def decline(self, rank: int, pick: int, reason: Reason) -> None:
        consumer, (key, attempt) = _pick(self.consumers(), rank), _pick(self.unbound(), pick)
        if not consumer.is_live(key):
            self.world.decline(consumer, key, attempt, reason)

    @precondition(lambda self: self.waits())
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        self.world.abort(*_pick(self.waits(), pick))

    @precondition(lambda self: "declines" in self.faults and self.waits())
    @rule(pick=PICKS)
    def decline_again(self, pick: int) -> None:
        """vLLM tells of the same request a second time."""
        rank, wait = _pick(self.waits(), pick)
        self.world.decline(rank, wait.key, wait.attempt, Reason.CONSUMER_GONE)

    # The transport.

    @precondition(lambda self: self.world.fabric.flying())
    @rule(pick=PICKS, is_seen=st.booleans())
    def land(self, pick: int, is_seen: bool) -> None:
        """Bytes arrive; whoever posted them finds out when it looks."""
        post = _pick(self.world.fabric.flying(), pick)
        post.land()
        if is_seen:
            for rank in self.world.ranks.values():
                if rank.agent is post.owner and rank.is_awake:
                    rank.run()

    @precondition(lambda self: self.world.fabric.flying())
    @rule(pick=PICKS)
    def fail(self, pick: int) -> None:
        post = _pick(self.world.fabric.flying(), pick)
        self.world.fabric.fail(post.owner, post.peer)

    @precondition(lambda self: self.world.fabric.flying())
    @rule()
    def settle(self) -> None:
        """What flies lands, whoever posted it finds out, and so does the other side."""
        self.world.settle()

    @rule(pick=PICKS)
    def look(self, pick: int) -> None:
        """A mover that wakes for nothing, or for a transfer."""
        rank = _pick(list(self.world.ranks.values()), pick)
        if rank.is_awake:
            rank.run()

    # The network and the clock.

    @precondition(lambda self: self.towards_producer())
    @rule(pick=PICKS, at=PICKS, is_lost=st.booleans())
    def to_producer(self, pick: int, at: int, is_lost: bool) -> None:
        connection = _pick(self.towards_producer(), pick)
        is_bad = "frames" in self.faults
        frame = connection.to_producer.pop(at % len(connection.to_producer) if is_bad else 0)
        if not (is_bad and is_lost):
            self.world.to_producer(connection, frame)

    @precondition(lambda self: self.towards_consumers())
    @rule(pick=PICKS, at=PICKS, is_lost=st.booleans())
    def to_consumer(self, pick: int, at: int, is_lost: bool) -> None:
        connection = _pick(self.towards_consumers(), pick)
        is_bad = "frames" in self.faults
        frame = connection.to_consumer.pop(at % len(connection.to_consumer) if is_bad else 0)
        if not (is_bad and is_lost):
            self.world.to_consumer(connection, *frame)

    @precondition(lambda self: "frames" in self.faults and self.world.producer.is_awake)
    @rule(pick=PICKS, at=PICKS)
    def again_to_producer(self, pick: int, at: int) -> None:
        """A frame that has arrived arrives once more."""
        connections = [each for each in self.world.connections if each.at_producer]
        if connections:
            connection = _pick(connections, pick)
            self.world.to_producer(connection, _pick(connection.at_producer, at))

    @precondition(lambda self: "frames" in self.faults)
    @rule(pick=PICKS, at=PICKS)
    def again_to_consumer(self, pick: int, at: int) -> None:
        connections = [each for each in self.world.connections if each.at_consumer and each.is_open]
        if connections and (connection := _pick(connections, pick)).rank.is_awake:
            self.world.to_consumer(connection, *_pick(connection.at_consumer, at))

    @precondition(lambda self: self.towards_producer() or self.towards_consumers())
    @rule(rounds=ROUNDS)
    def deliver(self, rounds: int | None) -> None:
        self.world.deliver(rounds)

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.25, 3.25]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds, is_connected="silence" not in self.faults)

    @precondition(lambda self: "waits" in self.faults)
    @rule(seconds=st.sampled_from([3.5, 11.0, 31.0, 65.0, 101.0]), is_connected=st.booleans())
    def wait(self, seconds: float, is_connected: bool) -> None:
        self.world.pass_time(seconds, is_connected=is_connected or "silence" not in self.faults)

    @precondition(lambda self: "breaks" in self.faults and self.connections())
    @rule(pick=PICKS, is_seen=st.booleans())
    def break_connection(self, pick: int, is_seen: bool) -> None:
        """It is mended at once, under another route, if the producer lives; who lives on, and is awake, hears of it."""
        self.world.break_connection(_pick(self.connections(), pick), is_seen_by_producer=is_seen)

    # Processes.

    @precondition(lambda self: "processes" in self.faults)
    @rule(pick=PICKS)
    def stop_or_wake(self, pick: int) -> None:
        rank = _pick(list(self.world.ranks.values()), pick)
        if rank.agent.is_alive:
            (self.world.wake if rank.agent.is_stopped else self.world.stop)(rank)

    @precondition(lambda self: "processes" in self.faults)
    @rule(pick=PICKS)
    def kill_or_restart(self, pick: int) -> None:
        rank = _pick(list(self.world.ranks.values()), pick)
        if rank.agent.is_alive:
            self.world.kill(rank)
        else:
            self.world.restart(rank.name)

    def teardown(self) -> None:
        self.world.calm()


def _pick(things, number: int):  # type: ignore[no-untyped-def]
    """One of them, whatever the number."""
    return things[number % len(things)]


Walk.TestCase.settings = settings(
    max_examples=EXAMPLES or 200,
    stateful_step_count=STEPS,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_random_walks = Walk.TestCase
