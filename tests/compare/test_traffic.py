"""The traffic of a cell."""

from pathlib import Path

import numpy as np
import pytest
from tests.compare.conftest import cell, settings

from kvberth.compare.plan import Memory, groups
from kvberth.compare.traffic import (
    cell_plan,
    check_traffic,
    choose_trace,
    fragmenting_plan,
    prefix_plan,
    settling_plan,
)


def prompts(plan):
    return [each.prompt_token_ids.tolist() for each in plan.requests]


def test_the_same_cell_gets_the_same_traffic():
    """In every mode; in another repetition other prompts."""
    of = cell(prompt_tokens=64)
    first, again, later = (cell_plan(settings(), of, repetition) for repetition in (0, 0, 1))
    assert prompts(first) == prompts(again)
    assert prompts(first) != prompts(later)
    assert [each.arrival_seconds for each in first.requests] == [0.0, 0.125, 0.25, 0.375]


def test_a_shared_part_is_shared_and_the_rest_is_not():
    """What is put into the caches is the beginning of every prompt, and nothing more of any."""
    of = cell(prompt_tokens=64, shared_tokens=48)
    (warm,) = prompts(prefix_plan(settings(), of, 0))
    sent = prompts(cell_plan(settings(), of, 0))
    assert {tuple(prompt[:48]) for prompt in (warm, *sent)} == {tuple(warm[:48])}
    assert len({tuple(prompt[48:]) for prompt in (warm, *sent)}) == 5
    assert {len(prompt) for prompt in sent} == {64}


def test_hits_in_fresh_and_in_fragmented_memory_have_prefixes_of_their_own():
    """Or the second one would find what the first has left."""
    fresh, fragmented = (
        prompts(cell_plan(settings(), cell(prompt_tokens=64, shared_tokens=48, memory=memory), 0))[0]
        for memory in (Memory.FRESH, Memory.FRAGMENTED)
    )
    assert fresh[:48] != fragmented[:48]


def test_memory_is_used_by_prompts_that_are_not_measured():
    """Warm-up is of the grid's lengths, and none of it is a prompt of a cell."""
    chosen = settings(prompts=(1024, 4096), warmup_requests=5)
    warm = settling_plan(chosen, [cell(prompt_tokens=1024)], 0)
    assert [len(each.prompt_token_ids) for each in warm.requests] == [1024, 4096, 1024, 4096, 1024]
    measured = prompts(cell_plan(chosen, cell(prompt_tokens=1024), 0))
    assert not [prompt for prompt in prompts(warm) if prompt in measured]


def test_fragmenting_traffic_uses_the_memory_more_than_once():
    """409,600 tokens are the emulated profile's; lengths are mixed."""
    lengths = [len(each.prompt_token_ids) for each in fragmenting_plan(settings(), 0).requests]
    assert sum(lengths) > 300_000
    assert np.std(lengths) > 2000


def test_cancellations_are_the_same_for_all_modes():
    """Who goes away, and when, is part of the traffic; prefixes change nothing about it."""
    of = cell(prompt_tokens=64, requests=40, output_tokens=9)
    shared = cell(prompt_tokens=64, requests=40, output_tokens=9, shared_tokens=48)
    for each in (of, shared):
        plans = [cell_plan(settings(cancel_share=0.5), each, 0) for _ in range(2)]
        first, again = ([request.cancellation for request in plan.requests] for plan in plans)
        assert first == again
        assert 8 < sum(cancellation is not None for cancellation in first) < 32


TRACES = Path(__file__).parents[1] / "bench" / "traces"


def of_trace(name, *, requests=6, turns=1, speeds=(1.0,), **changes):
    """A comparison on a recorded trace."""
    choice, _ = choose_trace(TRACES / name, requests=requests, turns=turns, speeds=speeds, skip_bad_rows=True)
    return settings(**({"trace": choice, "turns": turns, "arrivals": "trace", "output_tokens": None} | changes))


def test_a_trace_is_sent_at_its_own_times_and_faster():
    """Lengths and answers are the file's; a cell at twice the speed is the same traffic in half the time."""
    chosen = of_trace("mooncake.jsonl", speeds=(2.0, 1.0))
    slow, fast = ([*cell_plan(chosen, each, 0).requests] for each in groups(chosen)[0].cells)
    assert chosen.trace.requests == len(slow) == len(fast)
    assert [each.arrival_seconds for each in slow] == [2 * each.arrival_seconds for each in fast]
    assert [len(each.prompt_token_ids) for each in slow] == [len(each.prompt_token_ids) for each in fast]
    assert chosen.trace.rate == pytest.approx(len(slow) / slow[-1].arrival_seconds)


def test_a_trace_can_be_sent_at_rates():
    """With its lengths, and arrivals as the grid has them."""
    chosen = of_trace("mooncake.jsonl", arrivals="uniform", rates=(4.0,), output_tokens=7)
    (each,) = groups(chosen)[0].cells
    plan = cell_plan(chosen, each, 0)
    assert [request.arrival_seconds for request in plan.requests[:3]] == [0.0, 0.25, 0.5]
    assert {request.output_tokens for request in plan.requests} == {7}


def test_what_goes_before_a_trace_is_of_its_kind_and_not_of_it():
    """Chats before chats, and none of its own prompts, which a prefix cache would know then."""
    for name, is_chat in (("mooncake.jsonl", False), ("sharegpt.json", True)):
        chosen = of_trace(name, arrivals="poisson", output_tokens=4, warmup_requests=3)
        (each, *_) = groups(chosen)[0].cells
        warm, sent = settling_plan(chosen, [each], 0).requests, cell_plan(chosen, each, 0).requests
        assert len(warm) == 3
        assert {bool(request.messages) for request in (*warm, *sent)} == {is_chat}
        known = {(request.messages, request.prompt_token_ids.tobytes()) for request in sent}
        assert not known & {(request.messages, request.prompt_token_ids.tobytes()) for request in warm}


def test_conversations_and_shared_beginnings():
    """Whatever the load generator can send."""
    chosen = settings(turns=2, prefix_share=0.5, prefixes=1, cancel_share=0.5, cancel_seconds=1.0)
    first, second, third, _ = cell_plan(chosen, cell(prompt_tokens=64), 0).requests
    assert (first.follows, second.follows, third.follows) == (None, 0, None)
    assert first.prompt_token_ids[:32].tolist() == third.prompt_token_ids[:32].tolist()
    assert {each.cancellation.tokens for each in (first, second, third) if each.cancellation} <= {None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"prefix_share": 1.5}, "prefix_share: must be 0 or more"), ({"prefixes": 0}, "prefixes: must be 1 or more")],
)
def test_traffic_that_cannot_be_is_refused_before_anything_starts(changes, says):
    """In the load generator's own words."""
    with pytest.raises(ValueError, match=f"^{says}"):
        check_traffic(settings(**changes))
