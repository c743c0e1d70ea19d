"""Figures and intervals from repeated measurements."""

import numpy as np
import pytest

from kvberth.compare.statistics import least_requests, paired_ratio, percentiles


def test_a_figure_is_the_median_over_repetitions():
    """One repetition that went wrong does not move it."""
    samples = [[100.0, 102.0, 104.0], [101.0, 103.0, 105.0], [900.0, 902.0, 904.0]]
    p50, _, _ = percentiles(samples)
    assert p50.value == 103.0


def test_percentiles_are_numpy_s():
    """Interpolated linearly, as vllm bench serve has them."""
    values = np.random.default_rng(2).normal(100, 10, size=300).tolist()
    assert [each.value for each in percentiles([values])] == pytest.approx(np.percentile(values, (50, 95, 99)))


@pytest.mark.parametrize(("percentile", "least"), [(50, 5), (95, 59), (99, 299)])
def test_how_many_requests_a_percentile_needs(percentile, least):
    """The fewest of which the largest is above it with 95% confidence: all below has probability p**n."""
    assert least_requests(percentile) == least
    share = percentile / 100
    assert share**least <= 0.05 < share ** (least - 1)


def test_percentiles_of_too_few_requests_are_not_claimed():
    """The fewest of a repetition count; the median is there in any case."""
    enough, few = [float(value) for value in range(59)], [1.0] * 58
    assert [each is None for each in percentiles([enough, enough])] == [False, False, True]
    assert [each is None for each in percentiles([enough, few])] == [False, True, True]
    assert [each is None for each in paired_ratio([enough, few], [enough, few])] == [False, True, True]
    assert percentiles([[1.0]])[0].value == 1.0


def test_failed_requests_have_no_value():
    """They are left out, and nothing is left of a cell in which all failed."""
    assert percentiles([[5.0, None, 5.0]])[0].value == 5.0
    assert percentiles([[None, None]]) is None
    assert percentiles([]) is None


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    """95% intervals of a median of 40 draws hold the true median in 88 to 100% of 60 experiments."""
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        samples = generator.normal(100, 10, size=(2, 20)).tolist()
        p50, _, _ = percentiles(samples)
        hits += p50.low <= 100 <= p50.high
    assert hits >= 53


def test_an_interval_knows_that_repetitions_differ():
    """The same requests, but engines that started worse once: wider than within one repetition."""
    alike = percentiles([[100.0, 101.0, 102.0]] * 3)[0]
    apart = percentiles([[100.0, 101.0, 102.0], [130.0, 131.0, 132.0], [100.0, 101.0, 102.0]])[0]
    assert apart.high - apart.low > 5 * (alike.high - alike.low)


def test_a_ratio_is_taken_within_a_repetition():
    """A machine that was twice as slow in one repetition, for both modes, does not show."""
    push = [[50.0 + place for place in range(300)], [100.0 + 2 * place for place in range(300)]]
    pull = [[2 * value for value in repetition] for repetition in push]
    for estimate in paired_ratio(push, pull):
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_takes_the_requests_that_both_answered():
    """What one of them failed is in neither."""
    ratio = paired_ratio([[50.0, None, 50.0]], [[100.0, 100.0, 100.0]])
    assert ratio[0].value == 0.5
    assert paired_ratio([[None]], [[1.0]]) is None


def test_equal_modes_are_not_told_apart():
    """Two draws of one distribution: the interval of their ratio holds 1."""
    a, b = np.random.default_rng(5).normal(100, 5, size=(2, 3, 40)).tolist()
    ratio = paired_ratio(a, b)[0]
    assert ratio.low < 1 < ratio.high


def test_the_same_records_give_the_same_interval():
    """A report that is made again is the same report."""
    samples = np.random.default_rng(7).normal(100, 5, size=(2, 20)).tolist()
    assert percentiles(samples) == percentiles(samples)


def test_what_is_below_the_clock_s_resolution_is_equal():
    """A server that sends all tokens in one chunk has a TPOT of 0; over another such one that is 1."""
    assert paired_ratio([[0.0, 0.0]], [[0.0, 0.0]])[0].value == 1.0
