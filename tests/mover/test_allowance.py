"""What each peer may send."""

from kvberth.mover.allowance import Allowance


def test_a_burst_then_a_rate():
    """As much at once as is kept, and then as much as comes in."""
    allowance = Allowance(per_second=10, burst=5)
    assert [allowance.take("a", 10, 0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [allowance.take("a", 10, 0.2) for _ in range(3)] == [True, True, False]
    assert [allowance.take("a", 10, 100.0) for _ in range(6)] == [True] * 5 + [False]


def test_one_peer_s_flood_is_not_another_s():
    """Everyone has a bucket of one's own."""
    allowance = Allowance(per_second=10, burst=5)
    for _ in range(1000):
        allowance.take("flood", 10, 0.0)
    assert allowance.take("quiet", 10, 0.0)


def test_long_messages_cost_more():
    """One that is allowed is taken whole, and paid for later."""
    allowance = Allowance(per_second=10, burst=5)
    assert allowance.take("a", 30 * 1024, 0.0)
    assert not allowance.take("a", 1, 2.0)
    assert allowance.take("a", 1, 2.7)


def test_peers_that_are_gone_are_forgotten():
    """Names that a flood makes up do not stay."""
    allowance = Allowance(per_second=10, burst=5)
    for number in range(5000):
        allowance.take(number, 1, number / 100)
    assert len(allowance._left) <= 2 * 1024 + 1
