"""`/health` is caught lying, in both directions, and only then."""

import pytest

from kvberth.drills.health import BACK_SECONDS, ROUTER, HealthSample, Outage, untruths


def outage(name: str = "decode-0", *, is_certain: bool = True) -> Outage:
    """From 10 to 20 s, to be noticed within 3; it serves again from 22 s on."""
    return Outage(name=name, begin=10.0, end=20.0, back=22.0, is_certain=is_certain, notice_seconds=3.0)


def at(moment: float, **usable: bool) -> HealthSample:
    return HealthSample(moment, {name.replace("_", "-"): each for name, each in usable.items()})


@pytest.mark.parametrize(
    ("sample", "is_true"),
    [
        (at(5.0, decode_0=True), True),
        (at(5.0, decode_0=False), False),
        (at(11.0, decode_0=True), True),
        (at(11.0, decode_0=False), True),
        (at(14.0, decode_0=True), False),
        (at(14.0, decode_0=False), True),
        (at(14.0, decode_1=False), False),
        (at(20.5, decode_0=False), True),
        (at(20.5, decode_0=True), True),
        (at(22.5, decode_0=False), True),
        (at(22.5 + BACK_SECONDS, decode_0=False), False),
        (HealthSample(14.0, None), False),
    ],
)
def test_what_may_be_said_when(sample, is_true):
    """Of a decode worker that was away from 10 to 20 s."""
    assert (untruths([sample], [outage()]) == []) is is_true


def test_an_engine_that_is_only_slow_may_be_called_either():
    """As one that is stopped for a moment."""
    samples = [at(14.0, decode_0=True), at(15.0, decode_0=False)]
    assert untruths(samples, [outage(is_certain=False)]) == []


def test_a_router_that_is_away_says_nothing_and_then_knows_nobody():
    """It has to look at the engines first."""
    samples = [HealthSample(14.0, None), at(20.5, decode_0=False, prefill_0=False)]
    assert untruths(samples, [outage(ROUTER, is_certain=False)]) == []


def test_one_line_per_engine():
    """Not one per sample."""
    samples = [at(moment / 4, decode_1=False) for moment in range(20)]
    assert untruths(samples, []) == ["/health called decode-1 unusable at 0.0 s, without a reason"]
