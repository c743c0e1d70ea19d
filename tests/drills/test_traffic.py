"""What is sent, and what it is owed."""

from dataclasses import replace

from kvberth.drills.traffic import DrillRequest, TrafficShape, first_seconds, plan_traffic
from kvberth.emulator.answers import answer_text
from kvberth.router.binding import Binding

SHAPE = TrafficShape(rate=50.0, prompt_tokens=(10, 20), output_tokens=(2, 4))


def plan(seconds: float, seed: int = 1, shape: TrafficShape = SHAPE) -> list[DrillRequest]:
    return list(first_seconds(seconds, plan_traffic(shape, seed)))


def test_same_seed_same_plan():
    """And another seed another one; a longer plan begins as a shorter one."""
    assert plan(2.0) == plan(2.0) != plan(2.0, seed=2)
    assert plan(3.0)[: len(plan(2.0))] == plan(2.0)


def test_arrivals_are_in_order_and_within_the_time():
    """About as many as the rate says."""
    arrivals = [each.arrival_seconds for each in plan(10.0)]
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < 10.0
    assert 400 < len(arrivals) < 600


def test_every_kind_of_request_is_there():
    """Lengths, streams, both modes, every binding; all stay, as long as none is to leave."""
    requests = plan(10.0)
    assert {len(each.prompt) for each in requests} == {10, 20}
    assert {each.output_tokens for each in requests} == {2, 4}
    assert {each.is_streamed for each in requests} == {True, False}
    assert {each.mode for each in requests} == {"push", "pull"}
    assert {each.binding for each in requests} == {each.value for each in Binding}
    assert {each.leaves_after_seconds for each in requests} == {None}


def test_clients_that_leave_do_so_within_a_second():
    """About their share of them."""
    requests = plan(10.0, shape=replace(SHAPE, leaving=0.5))
    patience = [each.leaves_after_seconds for each in requests if each.leaves_after_seconds is not None]
    assert 0.4 < len(patience) / len(requests) < 0.6
    assert all(0 <= each < 1 for each in patience)


def test_each_request_knows_its_answer():
    """The emulator's, for its prompt and length."""
    for each in plan(0.2):
        assert each.answer == answer_text(each.prompt, each.output_tokens)
