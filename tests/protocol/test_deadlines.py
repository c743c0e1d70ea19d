"""Deadlines of many transfers."""

from hypothesis import given
from hypothesis import strategies as st

from kvberth.protocol import TransferKey
from kvberth.protocol.deadlines import Deadlines

A, B, C = (TransferKey(name) for name in "abc")


def test_moved_deadline_fires_once_at_its_new_time():
    """The old time of a moved deadline does nothing."""
    deadlines = Deadlines()
    deadlines.set(A, 5.0)
    deadlines.set(A, 9.0)
    assert deadlines.take_due(5.0) == []
    assert deadlines.take_due(9.0) == [A]
    assert deadlines.next() is None


def test_removed_deadline_does_not_fire():
    """None removes."""
    deadlines = Deadlines()
    deadlines.set(A, 5.0)
    deadlines.set(A, None)
    assert deadlines.next() is None
    assert deadlines.take_due(10.0) == []


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.none() | st.floats(0, 100)), max_size=200), st.floats(0, 100))
def test_due_are_all_that_are_due(steps, now):
    """Whatever was set, moved and removed: exactly the current deadlines up to now fire."""
    deadlines, expected = Deadlines(), {}
    for key, when in steps:
        deadlines.set(key, when)
        if when is None:
            expected.pop(key, None)
        else:
            expected[key] = when
    assert deadlines.next() == min(expected.values(), default=None)
    assert set(deadlines.take_due(now)) == {key for key, when in expected.items() if when <= now}
