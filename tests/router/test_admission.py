"""Who may come in, who waits, who goes, and when it is worth to come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.router.admission import Admission


def nobody():
    raise AssertionError("nobody waits")


def test_the_first_come_in_the_next_wait_and_the_rest_go():
    """Two bounds."""
    admission = Admission(2, 1)
    places = [admission.arrive(0, nobody) for _ in range(4)]
    assert [place and place.is_admitted for place in places] == [True, True, False, None]
    assert (admission.in_flight, admission.queued) == (2, 1)


def test_who_waits_longest_is_next():
    """First come, first served."""
    admission = Admission(1, 3)
    turns = []
    running = admission.arrive(0, nobody)
    waiting = [admission.arrive(0, lambda name=name: turns.append(name)) for name in "abc"]
    admission.leave(running, 1)
    admission.leave(waiting[0], 2)
    assert turns == ["a", "b"]
    assert (waiting[1].is_admitted, waiting[2].is_admitted) == (True, False)


def test_who_leaves_the_queue_frees_a_place_there():
    """And is passed over."""
    admission = Admission(1, 2)
    turns = []
    running = admission.arrive(0, nobody)
    waiting = [admission.arrive(0, lambda name=name: turns.append(name)) for name in "ab"]
    assert admission.arrive(0, nobody) is None
    admission.leave(waiting[0], 0)
    assert admission.arrive(0, nobody) is not None
    admission.leave(running, 1)
    assert turns == ["b"]


@pytest.mark.parametrize(
    ("max_queue", "ended_at", "now", "seconds"),
    [
        (0, [], 0.0, 1),  # a burst on an idle router
        (0, [], 7.0, 7),  # nothing has ended since
        (0, [1, 2, 3, 4], 4.0, 1),  # one a second
        (9, [1, 2, 3, 4], 4.0, 10),  # and nine wait
        (0, [10, 20], 20.0, 10),
        (9, [10, 20], 20.0, 60),  # not longer than this
        (0, [1, 2, 3], 120.0, 60),  # what was over a minute ago does not count
    ],
)
def test_when_to_come_again(max_queue, ended_at, now, seconds):
    """At the pace at which places became free within the last minute."""
    admission = Admission(1, max_queue + 1)
    place = admission.arrive(0, nobody)
    for time in ended_at:
        following = admission.arrive(time, lambda: None)
        admission.leave(place, time)
        place = following
    for _ in range(max_queue):
        admission.arrive(now, nobody)
    assert admission.retry_after_seconds(now) == seconds


def test_a_fast_router_is_not_measured_over_more_than_it_remembers():
    """Of a thousand ends a second the last few tell the pace."""
    admission = Admission(1, 1)
    place = admission.arrive(0, nobody)
    for number in range(1, 20_001):
        following = admission.arrive(number / 1000, lambda: None)
        admission.leave(place, number / 1000)
        place = following
    assert admission.retry_after_seconds(20.0) == 1


def test_what_lies_before_a_pause_does_not_count():
    """An idle router did not work slowly."""
    admission = Admission(1, 0)
    admission.leave(admission.arrive(0, nobody), 1)
    admission.arrive(50, nobody)
    assert admission.retry_after_seconds(50.5) == 1


@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=40))
def test_places_are_neither_lost_nor_made(max_in_flight, max_queue, moves):
    """Whoever comes and goes: both bounds hold, nobody waits beside a free place, and all is free in the end."""
    admission = Admission(max_in_flight, max_queue)
    inside = []
    for now, move in enumerate(moves):
        if move < 5:
            place = admission.arrive(now, lambda: None)
            inside += [place] if place else []
        elif inside:
            admission.leave(inside.pop(move % len(inside)), now)
        assert admission.in_flight == sum(place.is_admitted for place in inside) <= max_in_flight
        assert admission.queued == sum(not place.is_admitted for place in inside) <= max_queue
        assert admission.queued == 0 or admission.in_flight == max_in_flight
        assert 1 <= admission.retry_after_seconds(now) <= 60
    for place in reversed(inside):
        admission.leave(place, 99)
    assert (admission.in_flight, admission.queued) == (0, 0)
