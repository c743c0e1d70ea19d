"""From the scheduler's message, as vLLM's classes look, to a plan."""

from types import SimpleNamespace

import numpy as np

from kvberth.emulator.contexts import StepPlan
from kvberth.emulator.messages import plan_of


def message(**changes) -> SimpleNamespace:
    """Two that arrive, and three that go on: one with a new block, one without, and one that was preempted."""
    new = [
        SimpleNamespace(req_id="new", prompt_token_ids=[5, 6, 7], block_ids=([3, 1],), num_computed_tokens=0),
        SimpleNamespace(req_id="received", prompt_token_ids=[8, 9], block_ids=([4],), num_computed_tokens=1),
    ]
    cached = SimpleNamespace(
        req_ids=["grows", "goes on", "back"],
        new_block_ids=[([7],), None, ([2, 9],)],
        num_computed_tokens=[16, 20, 0],
        num_output_tokens=[1, 4, 2],
        resumed_req_ids={"back"},
        all_token_ids={"back": [1, 2, 3]},
    )
    fields = {
        "scheduled_new_reqs": new,
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": {"new": 3, "received": 1, "grows": 1, "goes on": 1, "back": 3},
        "finished_req_ids": {"gone"},
        "preempted_req_ids": {"lost"},
    }
    return SimpleNamespace(**{**fields, **changes})


def test_arrivals_are_taken_over():
    """Prompt, blocks, and what is computed and is to be."""
    new, received = plan_of(message()).arrivals
    assert (new.request_id, new.tokens.tolist(), new.blocks.tolist()) == ("new", [5, 6, 7], [3, 1])
    assert (new.computed, new.count) == (0, 3)
    assert (received.request_id, received.computed, received.count) == ("received", 1, 1)
    assert (new.tokens.dtype, new.blocks.dtype) == (np.uint32, np.int64)


def test_continuations_are_taken_over():
    """In the scheduler's order, each with its own figures."""
    grows, goes_on, back = plan_of(message()).continuations
    assert (grows.request_id, grows.new_blocks.tolist(), grows.computed, grows.outputs) == ("grows", [7], 16, 1)
    assert (goes_on.new_blocks, goes_on.resumed, goes_on.all_tokens) == (None, False, None)
    assert (back.resumed, back.new_blocks.tolist(), back.all_tokens.tolist()) == (True, [2, 9], [1, 2, 3])
    assert [each.count for each in (grows, goes_on, back)] == [1, 1, 3]


def test_ends_are_taken_over():
    """Whatever else is in the step."""
    assert plan_of(message()).finished == ("gone",)


def test_preemptions_are_taken_over():
    """None of them may be said as nothing."""
    assert plan_of(message()).preempted == ("lost",)
    assert plan_of(message(preempted_req_ids=None)).preempted == ()


def test_a_plan_is_a_copy():
    """The scheduler goes on with its own lists while the step waits for its turn."""
    original = message()
    plan = plan_of(original)
    original.scheduled_new_reqs[0].prompt_token_ids[0] = 0
    original.scheduled_new_reqs[0].block_ids[0][0] = 0
    original.scheduled_cached_reqs.new_block_ids[0][0][0] = 0
    original.scheduled_cached_reqs.all_token_ids["back"][0] = 0
    original.finished_req_ids.clear()
    assert plan.arrivals[0].tokens.tolist() == [5, 6, 7]
    assert plan.arrivals[0].blocks.tolist() == [3, 1]
    assert plan.continuations[0].new_blocks.tolist() == [7]
    assert plan.continuations[2].all_tokens.tolist() == [1, 2, 3]
    assert plan.finished == ("gone",)


def test_an_empty_message_is_an_empty_plan():
    """No step."""
    nobody = SimpleNamespace(
        req_ids=[],
        new_block_ids=[],
        num_computed_tokens=[],
        num_output_tokens=[],
        resumed_req_ids=set(),
        all_token_ids={},
    )
    empty = message(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nobody,
        num_scheduled_tokens={},
        finished_req_ids=set(),
        preempted_req_ids=None,
    )
    assert plan_of(empty) == StepPlan()
    assert plan_of(empty).chunks == []
