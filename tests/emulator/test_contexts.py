"""Sequences of plans as a scheduler makes them: the answer depends on the prompt and on the stored words alone."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.emulator.rig import BLOCK_SIZE, BLOCKS, LAYERS, LAYOUTS, Engine, Request, answer_of, make_tokens, split

from kvberth.emulator.canary import extend_sums, next_value
from kvberth.emulator.contexts import (
    FIRST_TOKEN,
    TOKEN_COUNT,
    Arrival,
    Continuation,
    StepPlan,
    StepResult,
    token_of,
)

BOTH = pytest.mark.parametrize("layout", LAYOUTS)
CUTS = st.lists(st.integers(0, 10_000), max_size=6)
PROMPT = make_tokens(70, seed=5)
"""Four blocks and six tokens."""


def found_in(results: list[StepResult]) -> list[tuple[str, int, int]]:
    """(request, layer, position) of what was found."""
    return [
        (each.request_id, each.corruption.layer, each.corruption.position) for step in results for each in step.found
    ]


def handed_over(layout: str = "layer-major") -> tuple[Engine, Request, list[int]]:
    """A decode worker that has received a prompt, and what the prefill worker answered to it."""
    prefill, original = Engine("layer-major", seed=1), Request("p", PROMPT)
    prefill.prefill(original)
    decode, request = Engine(layout, seed=2), Request("d", PROMPT)
    decode.receive(request, prefill, original)
    return decode, request, original.answer


def damage(engine: Engine, request: Request, layer: int, position: int, head: int = 0, bit: int = 0) -> None:
    block = request.blocks[position // BLOCK_SIZE]
    engine.words[layer, block, head, position % BLOCK_SIZE] ^= np.uint32(1 << bit)


# Prompt and answer.


@BOTH
@given(st.integers(1, 120), CUTS)
def test_chunks_do_not_change_the_answer(layout, length, cuts):
    """The prompt in one step or in any chunks, and then token by token."""
    prompt, engine = make_tokens(length), Engine(layout)
    request = Request("r", prompt)
    results = engine.prefill(request, split(length, cuts))
    results += engine.decode(request, 20)
    assert request.answer == answer_of(prompt, 21)
    assert found_in(results) == []
    assert sum(each.written_tokens for each in results) == length + 20
    assert sum(each.verified_tokens for each in results) == 0


def test_answers_are_made_of_what_came_before():
    """Each token of the values that the canary gives for the sum of all before it."""
    tokens = PROMPT.tolist()
    for _ in range(5):
        sums = extend_sums(0, 0, np.array(tokens, dtype=np.uint32))
        tokens.append(token_of(next_value(int(sums[-1]), 0)))
    assert answer_of(PROMPT, 5) == tokens[len(PROMPT) :]


def test_the_middle_of_a_prompt_answers_nothing():
    """Only the last chunk does."""
    results = Engine().prefill(Request("r", PROMPT), [32, 30, 8])
    assert [len(tokens) for each in results for tokens in each.tokens] == [0, 0, 1]
    assert [each.sampled_tokens for each in results] == [0, 0, 1]
    assert [each.request_ids for each in results] == [["r"]] * 3


def test_other_prompts_have_other_answers():
    """A single token makes the difference, wherever it is."""
    answers = []
    for position in range(len(PROMPT)):
        prompt = PROMPT.copy()
        prompt[position] += 1
        answers.append(tuple(answer_of(prompt, 4)))
    assert len({tuple(answer_of(PROMPT, 4)), *answers}) == len(PROMPT) + 1


@given(st.integers(0, 2**64 - 1))
def test_answers_are_of_ordinary_tokens(value):
    """Within the range that the tokenizer has words for."""
    assert FIRST_TOKEN <= token_of(value) < FIRST_TOKEN + TOKEN_COUNT


def test_a_batch_answers_as_each_alone():
    """Sequences of all lengths decode together, while others read their prompts."""
    engine = Engine()
    requests = [Request(f"r{length}", make_tokens(length, seed=length)) for length in (1, 15, 16, 17, 40, 64)]
    late = Request("late", make_tokens(50, seed=50))
    engine.step(*((request, len(request.prompt)) for request in requests))
    for count in (20, 20, 10, 1, 1, 1):
        result = engine.step((late, count), *((request, 1) for request in requests))
        assert result.found == []
        assert len(result.tokens) == len(requests) + 1
    for request in requests:
        assert request.answer == answer_of(request.prompt, 7)
    assert late.answer == answer_of(late.prompt, 4)


def test_results_are_in_the_plan_s_order():
    """Arrivals first, as in the scheduler's message."""
    engine, old, new = Engine(), Request("old", PROMPT), Request("new", PROMPT)
    engine.prefill(old)
    result = engine.step((old, 1), (new, 30))
    assert result.request_ids == ["new", "old"]
    assert [len(tokens) for tokens in result.tokens] == [0, 1]


def test_a_plan_s_chunks_are_what_the_timing_wants():
    """(tokens before, tokens computed), in the same order."""
    engine, old, new = Engine(), Request("old", PROMPT), Request("new", PROMPT)
    engine.prefill(old)
    assert engine.plan((old, 1), (new, 30)).chunks == [(0, 30), (70, 1)]


# Handoff.


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33, 100])
def test_a_handoff_gives_the_same_answer(source, target, length):
    """The decode worker computes the last token only, verifies all others, and goes on as the prefill worker would."""
    prompt = make_tokens(length)
    prefill, original = Engine(source, seed=1), Request("p", prompt)
    prefill.prefill(original)
    decode, request = Engine(target, seed=2), Request("d", prompt)
    decode.receive(request, prefill, original)
    first = decode.step((request, 1))
    assert request.answer == original.answer
    assert (first.verified_tokens, first.written_tokens) == (length - 1, 1)
    results = decode.decode(request, 20)
    assert found_in([first, *results]) == []
    assert sum(each.verified_tokens for each in results) == 0
    assert request.answer == answer_of(prompt, 21)


@BOTH
@given(st.integers(0, LAYERS - 1), st.integers(0, len(PROMPT) - 2), st.integers(0, 1), st.integers(0, 31))
@settings(max_examples=50)
def test_a_damaged_word_changes_the_answer(layout, layer, position, head, bit):
    """It is found at the first use, counted once, named, and every token from then on is another one."""
    decode, request, _ = handed_over(layout)
    damage(decode, request, layer, position, head, bit)
    results = decode.decode(request, 6)
    assert found_in(results) == [("d", layer, position)]
    assert found_in(results[:1]) == found_in(results)
    right = answer_of(PROMPT, 6)
    # One in 10,000 tokens is the same by chance.
    assert sum(ours == theirs for ours, theirs in zip(request.answer, right, strict=True)) <= 1


def test_different_damage_makes_different_answers():
    """The answer says that something is wrong, and also that it was not the same thing."""
    answers = set()
    for position in (0, 1, 40):
        decode, request, _ = handed_over()
        damage(decode, request, 0, position)
        decode.decode(request, 4)
        answers.add(tuple(request.answer))
    assert len(answers) == 3


def test_the_recomputed_token_may_be_wrong():
    """The last token's words are written again by the decode worker, so what arrived there does not matter."""
    decode, request, _ = handed_over()
    damage(decode, request, 0, len(PROMPT) - 1)
    results = decode.decode(request, 6)
    assert found_in(results) == []
    assert request.answer == answer_of(PROMPT, 6)


def test_a_handoff_that_never_came_is_found():
    """Blocks that were given but not filled."""
    decode, request = Engine(), Request("d", PROMPT)
    decode.give_blocks(request, len(PROMPT))
    request.computed = len(PROMPT) - 1
    (found,) = decode.step((request, 1)).found
    assert (found.corruption.position, found.corruption.found) == (0, 0)
    assert found.corruption.wrong_words == LAYERS * 2 * (len(PROMPT) - 1)


def test_one_request_s_damage_is_not_another_s():
    """A batch in which one context is wrong: the others answer as always."""
    prefill, original = Engine(seed=1), Request("p", PROMPT)
    prefill.prefill(original)
    decode, good, bad = Engine(seed=2), Request("good", PROMPT), Request("bad", PROMPT)
    for request in (good, bad):
        decode.receive(request, prefill, original)
    damage(decode, bad, 1, 30)
    results = [decode.step((good, 1), (bad, 1)) for _ in range(6)]
    assert found_in(results) == [("bad", 1, 30)]
    assert good.answer == answer_of(PROMPT, 6)
    assert bad.answer != good.answer


@pytest.mark.parametrize("shared", [16, 64])
def test_a_cached_prefix_is_verified(shared):
    """Another request's blocks, of an earlier step, stand for the beginning of the prompt."""
    engine, first = Engine(), Request("first", PROMPT)
    engine.prefill(first)
    second = Request("second", np.concatenate([PROMPT[:shared], make_tokens(20, seed=8)]))
    second.blocks = first.blocks[: shared // BLOCK_SIZE]
    second.computed = shared
    (result,) = engine.prefill(second)
    assert (result.verified_tokens, result.written_tokens, result.found) == (shared, 20, [])
    assert second.answer == answer_of(second.prompt, 1)


def test_a_prefix_of_another_prompt_is_found():
    """A cache that takes the wrong blocks for a prefix."""
    engine, first = Engine(), Request("first", PROMPT)
    engine.prefill(first)
    second = Request("second", make_tokens(52, seed=8), computed=32)
    second.blocks = first.blocks[:2]
    (result,) = engine.prefill(second)
    assert found_in([result]) == [("second", 0, 0)]


def test_a_prefix_of_the_same_step_is_right():
    """Two requests arrive together, and the second one's prefix is what the first one computes in this very step."""
    engine, first = Engine(), Request("first", PROMPT)
    second = Request("second", PROMPT, computed=64)
    engine.give_blocks(first, len(PROMPT))
    second.blocks = first.blocks[:4]
    result = engine.step((first, 70), (second, 6))
    assert result.found == []
    assert first.answer == second.answer == answer_of(PROMPT, 1)


def test_a_prefix_that_a_running_prompt_computes_is_right():
    """vLLM schedules running requests first and caches their blocks at once: an arrival may hit them in this step."""
    engine, first = Engine(), Request("first", PROMPT)
    second = Request("second", PROMPT, computed=64)
    engine.step((first, 32))
    engine.give_blocks(first, len(PROMPT))
    second.blocks = first.blocks[:4]
    result = engine.step((first, 38), (second, 6))
    assert result.found == []
    assert second.answer == answer_of(PROMPT, 1)


def test_a_prefix_that_ends_with_a_token_of_the_same_step_is_right():
    """The chunk of the first request that fills the shared block is a single token."""
    engine, first = Engine(), Request("first", PROMPT)
    second = Request("second", PROMPT, computed=32)
    engine.give_blocks(first, 32)
    warm = Request("warm", PROMPT[:31])
    warm.blocks = first.blocks
    engine.prefill(warm)
    first.computed = 31
    second.blocks = list(first.blocks)
    result = engine.step((first, 1), (second, 38))
    assert result.found == []
    assert second.answer == answer_of(PROMPT, 1)


# What schedulers take back.


@pytest.mark.parametrize(
    ("answered", "chunks"),
    [(0, []), (1, []), (5, []), (30, []), (0, [16, 16]), (1, [16, 16]), (30, [32, 48]), (30, [70, 1, 20]), (30, [99])],
)
def test_a_preempted_sequence_goes_on_as_before(answered, chunks):
    """It comes back with other blocks, and computes prompt and answer anew, in one step or in more."""
    engine, request, other = Engine(), Request("r", PROMPT), Request("other", PROMPT)
    engine.prefill(request, [40] if not answered else [])
    engine.decode(request, max(0, answered - 1))
    before = list(request.blocks)
    engine.preempt(request)
    engine.words[:, before] = 0xDEAD
    other.blocks = before[:5]
    engine.prefill(other)
    results = [engine.step((request, count)) for count in chunks]
    results.append(engine.step((request, len(PROMPT) + answered - sum(chunks))))
    results += engine.decode(request, 10)
    assert set(request.blocks).isdisjoint(other.blocks)
    assert found_in(results) == []
    assert request.answer == answer_of(PROMPT, answered + 11)


def test_tokens_sampled_ahead_of_a_preemption_are_dropped():
    """The rank has run a step whose token the scheduler threw away; the sequence comes back without it."""
    engine, request = Engine(), Request("r", PROMPT)
    engine.prefill(request)
    engine.decode(request, 4)
    ahead = engine.contexts.run(engine.plan((request, 1)))
    assert ahead.tokens != [[]]
    engine.preempt(request)
    results = [engine.step((request, len(PROMPT) + 5)), *engine.decode(request, 10)]
    assert found_in(results) == []
    assert request.answer == answer_of(PROMPT, 16)


def test_a_cached_part_of_a_preempted_sequence_is_verified():
    """It comes back to blocks that still hold its beginning: right ones first, then with one word changed."""
    for is_damaged in (False, True):
        engine, request = Engine(), Request("r", PROMPT)
        engine.prefill(request)
        engine.decode(request, 3)
        kept = request.blocks[:3]
        engine.preempt(request)
        request.blocks, request.computed = list(kept), 48
        if is_damaged:
            damage(engine, request, 2, 17)
        result = engine.step((request, len(PROMPT) + 4 - 48))
        assert result.verified_tokens == 48
        assert found_in([result]) == ([("r", 2, 17)] if is_damaged else [])
        assert (request.answer == answer_of(PROMPT, 5)) is not is_damaged


def test_the_scheduler_s_tokens_are_taken():
    """A sequence that comes back to a rank which has not seen its answer: all of its tokens are in the plan."""
    other, request = Engine(seed=1), Request("r", PROMPT)
    other.prefill(request)
    other.decode(request, 7)
    engine = Engine(seed=2)
    fresh = Request("r", PROMPT)
    engine.prefill(fresh, [16])
    engine.preempt(fresh)
    fresh.answer = list(request.answer)
    engine.step((fresh, len(PROMPT) + 8))
    assert fresh.answer == answer_of(PROMPT, 9)


@given(st.integers(2, 69), st.integers(1, 68))
def test_what_could_not_be_loaded_is_computed_again(loaded, back_to):
    """The scheduler goes back to where the load has failed; what lies before is verified once more."""
    back_to %= loaded
    prefill, original = Engine(seed=1), Request("p", PROMPT)
    prefill.prefill(original)
    decode, request = Engine(seed=2), Request("d", PROMPT)
    decode.receive(request, prefill, original)
    request.computed = loaded
    first = decode.step((request, 1))
    if first.tokens == [[]]:
        request.answer.clear()
    else:
        request.answer.pop()
    request.computed = back_to
    result = decode.step((request, len(PROMPT) - back_to))
    assert (result.written_tokens, result.verified_tokens, result.found) == (len(PROMPT) - back_to, back_to, [])
    results = decode.decode(request, 5)
    assert found_in(results) == []
    assert request.answer == answer_of(PROMPT, 6)


def test_what_was_wrong_and_is_computed_again_is_right():
    """The step that met the blocks which did not arrive is thrown away; the next one computes them."""
    decode, request = Engine(), Request("d", PROMPT)
    decode.give_blocks(request, len(PROMPT))
    request.computed = len(PROMPT) - 1
    assert len(decode.step((request, 1)).found) == 1
    request.answer.clear()
    request.computed = 0
    results = [*decode.prefill(request), *decode.decode(request, 5)]
    assert found_in(results) == []
    assert request.answer == answer_of(PROMPT, 6)


# Ends.


def test_finished_requests_are_forgotten():
    """With the next plan, and their names can be used again."""
    engine, request = Engine(), Request("r", PROMPT)
    engine.prefill(request)
    engine.finish(request)
    again = Request("r", make_tokens(30, seed=8))
    engine.prefill(again)
    assert len(engine.contexts) == 1
    assert again.answer == answer_of(again.prompt, 1)
    engine.finish(again)
    engine.step()
    assert len(engine.contexts) == 0


def test_an_unknown_end_is_no_error():
    """A request that was aborted before it ever ran here."""
    engine, request = Engine(), Request("never", PROMPT)
    engine.finish(request)
    assert engine.step().request_ids == []


# Plans that cannot be.


def test_tokens_that_nobody_knows_are_an_error():
    """With the request, what was to be computed, and what is known."""
    engine, request = Engine(), Request("r", PROMPT)
    with pytest.raises(ValueError, match="request r: 71 tokens are to be computed, but 70 are known"):
        engine.step((request, 71))


def test_a_decode_step_too_many_is_an_error():
    """The scheduler is ahead by more tokens than the rank has sampled."""
    engine, request = Engine(), Request("r", PROMPT)
    engine.prefill(request)
    request.computed += 1
    with pytest.raises(ValueError, match="request r: 72 tokens are to be computed, but 71 are known"):
        engine.step((request, 1))


def test_a_return_without_blocks_is_an_error():
    """A preempted sequence has lost its own."""
    engine, request = Engine(), Request("r", PROMPT)
    engine.prefill(request)
    plan = StepPlan(continuations=(Continuation("r", None, True, 0, 70, 1, None),))
    with pytest.raises(ValueError, match="request r is resumed without blocks"):
        engine.contexts.run(plan)


# Damage that comes late.


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("position", [0, 33, 69])
def test_late_damage_is_found_where_it_lies(seed, position):
    """Bytes that land in the blocks of a running context: within 60 steps of five or more blocks, and once."""
    engine, request = Engine(seed=seed), Request("r", PROMPT)
    engine.prefill(request)
    engine.decode(request, 5)
    damage(engine, request, 1, position)
    results = engine.decode(request, 60)
    assert found_in(results) == [("r", 1, position)]
    step = next(index for index, each in enumerate(results) if each.found)
    right = answer_of(PROMPT, 66)
    # What the step sampled in which it was found had been sampled before.
    assert request.answer[: 7 + step] == right[: 7 + step]
    tail = zip(request.answer[7 + step :], right[7 + step :], strict=True)
    assert sum(ours == theirs for ours, theirs in tail) <= 1


def test_late_damage_in_a_batch_is_found():
    """One of eight contexts, by one look per step."""
    engine = Engine(seed=4)
    requests = [Request(f"r{number}", make_tokens(30, seed=number)) for number in range(8)]
    engine.step(*((request, 30) for request in requests))
    damage(engine, requests[3], 2, 20)
    results = [engine.step(*((request, 1) for request in requests)) for _ in range(90)]
    assert found_in(results) == [("r3", 2, 20)]


def test_the_looks_are_the_same_for_the_same_seed():
    """A run can be repeated."""
    steps = []
    for _ in range(2):
        engine, request = Engine(seed=7), Request("r", PROMPT)
        engine.prefill(request)
        damage(engine, request, 0, 50)
        results = engine.decode(request, 60)
        steps.append([index for index, each in enumerate(results) if each.found])
    assert steps[0] == steps[1] != []


# Ranks.


class Sum:
    """What two ranks have found, added up on both: an all-reduce between threads."""

    def __init__(self) -> None:
        self._values = [0, 0]
        self._barrier = threading.Barrier(2, timeout=10)
        self.calls = [0, 0]

    def of_rank(self, rank: int):
        def reduce(error: int) -> int:
            self.calls[rank] += 1
            self._values[rank] = error
            self._barrier.wait()
            total = sum(self._values) % 2**64
            self._barrier.wait()
            return total

        return reduce


def on_two_ranks(run) -> list:
    """`run(rank)` of both at once."""
    results: list = [None, None]

    def call(rank: int) -> None:
        results[rank] = run(rank)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


class Pair:
    """A decode worker of two ranks, with one head slot each, that has received a prompt."""

    def __init__(self) -> None:
        self.sum = Sum()
        self.engines, self.requests = [], []
        for rank in range(2):
            prefill, original = Engine(seed=1, slots=1, first_slot=rank), Request("p", PROMPT)
            prefill.prefill(original)
            engine = Engine(seed=2, slots=1, first_slot=rank, reduce_error=self.sum.of_rank(rank))
            request = Request("d", PROMPT)
            engine.receive(request, prefill, original)
            self.engines.append(engine)
            self.requests.append(request)

    def decode(self, steps: int) -> list[list[tuple[str, int, int]]]:
        """What each rank has found."""
        return on_two_ranks(lambda rank: found_in(self.engines[rank].decode(self.requests[rank], steps)))


def test_two_ranks_answer_as_one():
    """They ask each other when they verify, both as often."""
    pair = Pair()
    assert pair.decode(6) == [[], []]
    assert pair.sum.calls[0] == pair.sum.calls[1] >= 1
    assert pair.requests[0].answer == pair.requests[1].answer == answer_of(PROMPT, 6)


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_at_one_rank_changes_the_answer_of_both(rank):
    """Only one of them has found it."""
    pair = Pair()
    damage(pair.engines[rank], pair.requests[rank], 1, 20)
    found = pair.decode(6)
    assert (found[rank], found[1 - rank]) == ([("d", 1, 20)], [])
    assert pair.requests[0].answer == pair.requests[1].answer != answer_of(PROMPT, 6)


@pytest.mark.parametrize("rank", [0, 1])
def test_late_damage_at_one_rank_is_counted_and_the_ranks_still_agree(rank):
    """The ranks would have to speak to each other in every step for it to change the answer of both."""
    pair = Pair()
    pair.decode(2)
    damage(pair.engines[rank], pair.requests[rank], 1, 20)
    assert pair.decode(60)[rank] == [("d", 1, 20)]
    assert pair.requests[0].answer == pair.requests[1].answer == answer_of(PROMPT, 62)


def test_the_whole_cache_can_be_one_context():
    """Nothing depends on blocks being left over."""
    prompt = make_tokens(BLOCKS * BLOCK_SIZE - 1)
    engine, request = Engine(), Request("r", prompt)
    engine.prefill(request, [1000, 23])
    engine.step((request, 1))
    assert request.answer == answer_of(prompt, 2)


def test_plans_hold_what_they_were_made_with():
    """The block table of an arrival is the context's from then on; later plans append to it."""
    engine = Engine()
    table = np.array([5, 9], dtype=np.int64)
    plan = StepPlan(arrivals=(Arrival("r", PROMPT[:20], table, 0, 20),))
    engine.contexts.run(plan)
    more = Continuation("r", np.array([2], dtype=np.int64), False, 20, 1, 1, None)
    engine.contexts.run(StepPlan(continuations=(more,)))
    assert table.tolist() == [5, 9]
    assert (engine.words != 0).any(axis=(0, 2, 3)).nonzero()[0].tolist() == [5, 9]
