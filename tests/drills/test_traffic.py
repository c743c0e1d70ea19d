"""What is sent, and what it is owed."""

from dataclasses import replace

from kvberth.drills.traffic import TrafficShape, plan_traffic
from kvberth.emulator.answers import answer_text

SHAPE = TrafficShape(rate=50.0, prompt_tokens=(10, 20), output_tokens=(2, 4))


def test_same_seed_same_plan():
    """And another seed another one."""
    assert plan_traffic(SHAPE, 2.0, 1) == plan_traffic(SHAPE, 2.0, 1) != plan_traffic(SHAPE, 2.0, 2)


def test_arrivals_are_in_order_and_within_the_time():
    """About as many as the rate says."""
    plan = plan_traffic(SHAPE, 10.0, 1)
    arrivals = [each.arrival_seconds for each in plan]
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < 10.0
    assert 400 < len(plan) < 600


def test_every_kind_of_request_is_there():
    """Lengths, streams, both modes; all stay, as long as none is to leave."""
    plan = plan_traffic(SHAPE, 10.0, 1)
    assert {len(each.prompt) for each in plan} == {10, 20}
    assert {each.output_tokens for each in plan} == {2, 4}
    assert {each.is_streamed for each in plan} == {True, False}
    assert {each.mode for each in plan} == {"push", "pull"}
    assert {each.leaves_after_seconds for each in plan} == {None}


def test_clients_that_leave_do_so_within_a_second():
    """About their share of them."""
    plan = plan_traffic(replace(SHAPE, leaving=0.5), 10.0, 1)
    patience = [each.leaves_after_seconds for each in plan if each.leaves_after_seconds is not None]
    assert 0.4 < len(patience) / len(plan) < 0.6
    assert all(0 <= each < 1 for each in patience)


def test_each_request_knows_its_answer():
    """The emulator's, for its prompt and length."""
    for each in plan_traffic(SHAPE, 0.2, 1):
        assert each.answer == answer_text(each.prompt, each.output_tokens)
