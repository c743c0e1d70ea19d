"""The policies, each as a function of what is known of engines and request."""

import pytest

from kvberth.router.binding import Binding
from kvberth.router.choice import (
    DECODE_POLICIES,
    PREFILL_POLICIES,
    Choice,
    DecodePolicy,
    PrefillPolicy,
    RequestFacts,
    choose_binding,
    free_kv,
    has_room,
    least_loaded,
    missing_tokens,
    queue,
    round_robin,
)
from kvberth.router.engines import Engine, EngineInfo, Role
from kvberth.router.load import EngineLoad, Held

FACTS = RequestFacts(1000, (1, 2))
NOTHING = Held()
NO_AFFINITY = 0.0


def engine(*, held=NOTHING, load=None, rate=None, seen=(), last_turn=0):
    made = Engine("http://e", held=held, load=load, last_turn=last_turn)
    if rate is not None:
        made.rate.add(rate, started_at=0.0, ended_at=1.0)
    made.prefixes.remember(seen)
    return made


def reading(running=0, waiting=0, kv_usage=0.0, held=NOTHING, capacity=100_000, prefixes=False):
    return EngineLoad(0.0, held, running, waiting, kv_usage, capacity, prefixes)


@pytest.mark.parametrize("policy", [*PREFILL_POLICIES.values(), *DECODE_POLICIES.values()])
def test_a_single_candidate_is_chosen_with_a_reason(policy):
    """By every policy, whatever is known of it."""
    for only in (engine(), engine(load=reading(1, 1, 1.0), rate=10, seen=FACTS.prefixes)):
        choice = policy([only], FACTS, NO_AFFINITY)
        assert choice.engine is only
        assert choice.reason


@pytest.mark.parametrize("policy", [*PREFILL_POLICIES.values(), *DECODE_POLICIES.values()])
def test_equals_take_turns(policy):
    """Idle engines are used in turn, so that no policy sends everything to the first."""
    some = [engine(last_turn=turn, load=reading(), rate=1000) for turn in (3, 1, 2)]
    assert policy(some, RequestFacts(), 0.5).engine is some[1]


def test_every_policy_has_a_function():
    """A name that can be configured can be used."""
    assert (set(PREFILL_POLICIES), set(DECODE_POLICIES)) == (set(PrefillPolicy), set(DecodePolicy))


def test_round_robin_looks_at_turns_only():
    """A busy engine has its turn too."""
    busy, idle = engine(held=Held(9, 9), last_turn=1), engine(last_turn=2)
    assert round_robin([busy, idle], FACTS, NO_AFFINITY) == Choice(busy, "its turn")


def test_least_loaded_counts_this_routers_requests():
    """The engine's own figures do not matter to it."""
    some = [engine(held=Held(n, 0)) for n in (3, 1, 2)]
    assert least_loaded(some, FACTS, NO_AFFINITY) == Choice(some[1], "fewest in flight, 1")


def test_queue_compares_tokens_and_not_requests():
    """One long prompt is a longer queue than three short ones."""
    long, short = engine(held=Held(1, 9000), rate=1000), engine(held=Held(3, 3000), rate=1000)
    assert queue([long, short], FACTS, NO_AFFINITY) == Choice(short, "shortest queue, 3000 ms")


def test_queue_knows_fast_engines():
    """The same tokens are sooner computed where more are computed in a second."""
    slow, fast = engine(held=Held(1, 4000), rate=1000), engine(held=Held(2, 6000), rate=3000)
    assert queue([slow, fast], FACTS, NO_AFFINITY).engine is fast


def test_queue_counts_what_other_routers_sent():
    """Requests that the engine shows and that are not ours are as long as its usual ones."""
    shared = engine(held=Held(1, 1000), load=reading(running=2, waiting=3, held=Held(1, 1000)), rate=1000)
    ours = engine(held=Held(3, 3000), load=reading(running=3, held=Held(3, 3000)), rate=1000)
    assert queue([shared, ours], FACTS, NO_AFFINITY) == Choice(ours, "shortest queue, 3000 ms")


def test_queue_takes_a_new_engine_to_be_like_the_others():
    """Without a rate of its own it is neither shunned nor swamped."""
    known, new = engine(held=Held(1, 2000), rate=1000), engine(held=Held(1, 1000))
    assert queue([known, new], FACTS, NO_AFFINITY).engine is new
    known.held, new.held = new.held, known.held
    assert queue([known, new], FACTS, NO_AFFINITY).engine is known


def test_queue_counts_requests_until_a_rate_is_known():
    """Those of others too."""
    more, fewer = engine(held=Held(2, 10)), engine(held=Held(1, 5000))
    assert queue([more, fewer], FACTS, 9.0) == Choice(fewer, "fewest requests, 1")
    fewer.load = reading(waiting=5)
    assert queue([more, fewer], FACTS, 9.0).engine is more


@pytest.mark.parametrize(("tokens_ahead", "is_preferred"), [(0, True), (500, True), (501, False)])
def test_queue_prefers_who_saw_the_prefix_within_reason(tokens_ahead, is_preferred):
    """Up to `affinity_seconds` longer a queue is accepted for a cache that may hold the beginning."""
    familiar = engine(held=Held(1, tokens_ahead), rate=1000, seen=[1])
    other = engine(rate=1000)
    choice = queue([other, familiar], FACTS, 0.5)
    assert choice.engine is (familiar if is_preferred else other)
    assert ("prefix seen" in choice.reason) is is_preferred


def test_the_longest_known_prefix_wins():
    """More of the prompt need not be computed; among equals the shorter queue."""
    short = engine(rate=1000, seen=[1])
    long = engine(held=Held(1, 300), rate=1000, seen=[1, 2])
    longer_queue = engine(held=Held(1, 400), rate=1000, seen=[1, 2])
    assert queue([short, longer_queue, long], FACTS, 0.5).engine is long


def test_affinity_without_a_rate_decides_among_equals_only():
    """Nobody knows then how long a queue is in seconds."""
    familiar, other = engine(seen=[1], last_turn=5), engine()
    assert queue([other, familiar], FACTS, 0.5).engine is familiar
    familiar.held = Held(1, 1)
    assert queue([other, familiar], FACTS, 0.5).engine is other


def test_free_kv_prefers_memory_over_requests():
    """Ten short answers leave more room than one long context."""
    full, roomy = engine(load=reading(running=1, kv_usage=0.5)), engine(load=reading(running=10, kv_usage=0.1))
    assert free_kv([full, roomy], RequestFacts(), NO_AFFINITY) == Choice(roomy, "most KV free, 90000 tokens")


def test_free_kv_counts_what_was_sent_since_the_reading():
    """And gives back what has ended since."""
    held = Held(1, 30_000)
    sent_since = engine(held=held, load=reading(kv_usage=0.1))
    in_reading = engine(held=held, load=reading(kv_usage=0.35, held=held))
    assert free_kv([sent_since, in_reading], RequestFacts(), NO_AFFINITY).engine is in_reading
    in_reading.held = Held()
    assert in_reading.free_kv_tokens == 95_000


def test_requests_decide_where_free_kv_is_about_the_same():
    """A hundredth of the memory is no difference."""
    busy, quiet = engine(load=reading(running=5, kv_usage=0.1)), engine(load=reading(running=2, kv_usage=0.105))
    assert free_kv([busy, quiet], RequestFacts(), NO_AFFINITY).engine is quiet


def computing(tokens_per_second, **load):
    """An engine that has computed so many tokens of prompts in the last second."""
    made = engine()
    for read_at, tokens in ((0.0, 0), (1.0, tokens_per_second)):
        made.take_load(EngineLoad(read_at, NOTHING, 0, 0, computed_tokens=tokens, **load))
    return made


@pytest.mark.parametrize(("tokens_per_second", "is_left_out"), [(1000, False), (1100, True)])
def test_free_kv_leaves_out_who_computes_prompts(tokens_per_second, is_left_out):
    """Streams there wait for these, however much memory is free."""
    disturbed = computing(tokens_per_second, kv_usage=0.0, kv_capacity_tokens=100_000)
    other = engine(load=reading(running=9, kv_usage=0.5))
    assert free_kv([disturbed, other], FACTS, NO_AFFINITY).engine is (other if is_left_out else disturbed)


def test_free_kv_would_rather_be_disturbed_than_wait_for_memory():
    """And where all compute prompts, they are compared as ever."""
    disturbed = computing(9000, kv_usage=0.1, kv_capacity_tokens=100_000)
    full = engine(load=reading(kv_usage=0.995))
    assert free_kv([disturbed, full], FACTS, NO_AFFINITY).engine is disturbed
    also_disturbed = computing(2000, kv_usage=0.5, kv_capacity_tokens=100_000)
    assert free_kv([also_disturbed, disturbed], FACTS, NO_AFFINITY).engine is disturbed


@pytest.mark.parametrize("unknown", [None, reading(capacity=None)])
def test_without_all_readings_requests_in_flight_decide(unknown):
    """An engine whose memory is not known is neither the best nor the worst."""
    known, other = engine(held=Held(2, 2), load=reading()), engine(held=Held(1, 1), load=unknown)
    choice = free_kv([known, other], FACTS, NO_AFFINITY)
    assert choice == Choice(other, "fewest in flight, 1; free KV not known of all")


@pytest.mark.parametrize(
    ("usage", "prompt_tokens", "is_preferred"), [(0.08, 1000, True), (0.12, 1000, False), (0.08, 95_000, False)]
)
def test_free_kv_prefers_who_saw_the_prefix_if_it_fits_there(usage, prompt_tokens, is_preferred):
    """Not where much less is free, and not where the prompt would have to wait for memory."""
    familiar, other = engine(load=reading(kv_usage=usage), seen=[1]), engine(load=reading())
    choice = free_kv([other, familiar], RequestFacts(prompt_tokens, FACTS.prefixes), NO_AFFINITY)
    assert choice.engine is (familiar if is_preferred else other)
    assert ("prefix seen" in choice.reason) is is_preferred


BUSY, IDLE = reading(running=5), reading()


@pytest.mark.parametrize(
    ("prefill", "decodes", "binding"),
    [
        ({"rate": 1000}, [BUSY], Binding.EARLY),  # nobody to choose from
        ({"rate": 1000}, [reading(kv_usage=0.995)] * 2, Binding.LATE),  # nobody has room for 1,000 tokens
        ({"rate": 1000}, [reading(kv_usage=0.995), BUSY], Binding.JIT),
        ({"rate": 1000}, [None, reading(kv_usage=0.995)], Binding.JIT),  # of one it is not known
        ({}, [BUSY, IDLE], Binding.JIT),  # how long it will take is not known
        ({"rate": 10_000}, [BUSY, IDLE], Binding.EARLY),  # 100 ms
        ({"rate": 9_000}, [BUSY, IDLE], Binding.JIT),
        ({"rate": 10_000, "held": Held(1, 500)}, [BUSY, IDLE], Binding.JIT),  # behind another prompt
        ({"rate": 1000}, [IDLE, IDLE], Binding.JIT),  # that may change
    ],
)
def test_binding_of_a_prompt_of_1000_tokens(prefill, decodes, binding):
    """Early where the choice would not change, late where nobody could reserve anything, just in time else."""
    choice = choose_binding(engine(**prefill), [engine(load=load) for load in decodes], FACTS)
    assert choice.binding is binding
    assert choice.reason


@pytest.mark.parametrize(("hears_router", "binding"), [(True, Binding.JIT), (False, Binding.EARLY)])
def test_prompt_that_cannot_be_followed_is_bound_early(hears_router, binding):
    """vLLM's own connectors say nothing of a prompt's progress: its moment would be missed."""
    prefill = engine(rate=1000)
    prefill.info = EngineInfo(Role.PREFILL, "p", "127.0.0.1", 5, 1, hears_router=hears_router)
    assert choose_binding(prefill, [engine(load=BUSY), engine(load=IDLE)], FACTS).binding is binding


@pytest.mark.parametrize(
    ("load", "sent_since", "missing"),
    [
        (reading(capacity=2000, prefixes=True), 0, 1000 - 512 / 8),
        (reading(capacity=2000, prefixes=True), 1000, 1000 - 512 / 8),
        (reading(capacity=2000, prefixes=True), 1001, 1000),  # half of its cache has been needed for others since
        (reading(capacity=2000), 0, 1000),  # it keeps none
        (reading(capacity=None, prefixes=True), 0, 1000),  # nobody knows how long it keeps them
        (None, 0, 1000),
    ],
)
def test_what_an_engine_lacks_of_a_prompt(load, sent_since, missing):
    """All but the beginning that it has seen and has still, as far as is known: 512 of 8,000 bytes here."""
    one = engine(load=load)
    one.prefixes.remember([1], 0)
    one.prefixes.remember([3], sent_since)
    assert missing_tokens(one, RequestFacts(1000, (1, 2), 8000)) == missing


def test_room_is_known_or_there_is_none():
    """Memory that is free and nobody who waits for it."""
    assert has_room(engine(load=reading(kv_usage=0.99)), FACTS)
    assert not has_room(engine(load=reading(kv_usage=0.995)), FACTS)
    assert not has_room(engine(load=reading(waiting=1)), FACTS)
    assert not has_room(engine(load=reading(kv_usage=0.99), held=Held(1, 1)), FACTS)
    assert not has_room(engine(), FACTS)
