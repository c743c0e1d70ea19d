"""The traffic of a cell."""

import numpy as np
from tests.compare.conftest import cell, settings

from kvberth.compare.plan import Memory
from kvberth.compare.traffic import cell_plan, fragmenting_plan, prefix_plan, settling_plan


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
    warm = settling_plan(chosen, 0)
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
