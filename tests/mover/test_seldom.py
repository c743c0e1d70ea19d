"""Lines that others can cause."""

from kvberth.mover.seldom import Seldom


def test_the_first_is_told_and_then_one_in_ten_seconds():
    """With the number of those that were not."""
    seldom = Seldom()
    assert [seldom.count(now) for now in (100.0, 100.1, 109.9, 110.0, 110.1, 130.0)] == [1, 0, 0, 3, 0, 2]
