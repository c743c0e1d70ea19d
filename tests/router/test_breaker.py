"""The circuit breaker as a machine: outcomes and times in, may a request be sent out."""

import pytest

from kvberth.router.breaker import Breaker, BreakerState, Outcome

CLOSED, OPEN, HALF_OPEN = BreakerState
SUCCESS, FAILURE, UNDECIDED = Outcome


def opened(at=0.0):
    breaker = Breaker()
    for _ in range(3):
        breaker.report(FAILURE, at, is_probe=False)
    return breaker


def probing(at=1.0):
    breaker = opened()
    assert breaker.enter(at)
    return breaker


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ([], CLOSED),
        ([FAILURE, FAILURE], CLOSED),
        ([FAILURE, FAILURE, FAILURE], OPEN),
        ([FAILURE, FAILURE, SUCCESS, FAILURE, FAILURE], CLOSED),
        ([FAILURE, UNDECIDED, FAILURE, UNDECIDED, FAILURE], OPEN),
        ([UNDECIDED] * 5, CLOSED),
    ],
)
def test_three_failures_in_a_row_open_it(outcomes, state):
    """A success between them starts the count anew; what proves nothing neither counts nor clears."""
    breaker = Breaker()
    for outcome in outcomes:
        breaker.report(outcome, 0.0, is_probe=False)
    assert breaker.state is state
    assert breaker.allows(0.0) is (state is CLOSED)


@pytest.mark.parametrize(
    ("make", "outcome", "is_probe", "state"),
    [
        (Breaker, SUCCESS, False, CLOSED),
        (Breaker, FAILURE, False, CLOSED),
        (Breaker, UNDECIDED, False, CLOSED),
        (opened, SUCCESS, False, CLOSED),
        (opened, FAILURE, False, OPEN),
        (opened, UNDECIDED, False, OPEN),
        (probing, SUCCESS, False, CLOSED),
        (probing, FAILURE, False, HALF_OPEN),
        (probing, UNDECIDED, False, HALF_OPEN),
        (probing, SUCCESS, True, CLOSED),
        (probing, FAILURE, True, OPEN),
        (probing, UNDECIDED, True, OPEN),
    ],
)
def test_every_state_and_outcome(make, outcome, is_probe, state):
    """A success closes it from anywhere; while it is half open, only the probe can open it again."""
    breaker = make()
    breaker.report(outcome, 1.0, is_probe=is_probe)
    assert breaker.state is state


def test_one_request_finds_out():
    """Nothing is sent during the pause, then one request, and no second one with it."""
    breaker = opened(at=10.0)
    assert not breaker.allows(10.99)
    assert not breaker.enter(10.99)
    assert breaker.allows(11.0)
    assert breaker.enter(11.0)
    assert (breaker.allows(11.9), breaker.enter(11.9)) == (False, False)
    breaker.report(SUCCESS, 11.5, is_probe=True)
    assert (breaker.allows(11.5), breaker.enter(11.5)) == (True, False)


def test_the_pause_doubles_up_to_half_a_minute():
    """And is short again after a success."""
    breaker = opened()
    pauses = []
    for _ in range(7):
        now = breaker.retry_at
        assert breaker.enter(now)
        breaker.report(FAILURE, now, is_probe=True)
        pauses.append(breaker.retry_at - now)
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    breaker.report(SUCCESS, 500.0, is_probe=False)
    for _ in range(3):
        breaker.report(FAILURE, 500.0, is_probe=False)
    assert breaker.retry_at == 501.0


def test_a_probe_that_takes_long_does_not_keep_the_engine_out():
    """One more request may find out after each pause; each of them may close or open the breaker."""
    breaker = probing(at=1.0)
    assert [breaker.enter(now) for now in (1.9, 2.0, 2.9, 3.0)] == [False, True, False, True]
    breaker.report(FAILURE, 3.5, is_probe=True)
    assert (breaker.state, breaker.retry_at) == (OPEN, 5.5)


def test_a_probe_that_was_cut_short_is_followed_by_another():
    """A client that goes away must not leave the engine out for ever."""
    breaker = probing()
    breaker.report(UNDECIDED, 1.5, is_probe=True)
    assert breaker.enter(1.5)
