"""Figures with their uncertainty, from repeated measurements. Pure.

A figure of a cell is the **median over repetitions** of that repetition's percentile. A ratio of two modes is the
median over repetitions of the ratio within each: what a machine does to all of one repetition cancels. Both modes had
the same requests, so a request that is resampled is resampled in both.

A percentile is given only if every repetition has requests enough to bound it: from n requests on, the largest is above
the percentile p with 95% confidence, where p**n <= 5% (Wilks, Annals of Mathematical Statistics 12, 1941): 5 for the
median, 59 for p95, 299 for p99. Below, it would be a figure of the largest request, under another name.

Intervals are 95% percentile intervals of a two-level bootstrap (Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 3.8): repetitions are drawn, and within each the requests. scipy's bootstrap has one level.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["PERCENTILES", "Estimate", "Samples", "least_requests", "paired_ratio", "percentiles"]

Samples = Sequence[Sequence[float | None]]
"""Per repetition one value per request, in the order of the plan; None for a request that has none."""

PERCENTILES = (50, 95, 99)
_DRAWS = 1000
_LEVEL = 95.0
_RESOLUTION = 0.001
"""Of the records, in their unit. A server that puts all tokens into one chunk has a TPOT of 0."""
_SEED = 0
"""Of the drawing: the same records give the same report."""

_Floats = npt.NDArray[np.float64]
_Statistic = Callable[[_Floats, _Floats], _Floats]


class Estimate(msgspec.Struct, frozen=True):
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float


def least_requests(percentile: float) -> int:
    """How many a repetition must have for this percentile."""
    return math.ceil(math.log(1 - _LEVEL / 100) / math.log(percentile / 100))


def percentiles(samples: Samples) -> tuple[Estimate | None, ...] | None:
    """`PERCENTILES` of one quantity, interpolated linearly as numpy does.

    Returns:
        None without any value. The median is always there, the others only with `least_requests`.
    """
    known = [_known(repetition) for repetition in samples]
    pairs = [(values, values) for values in known if values.size]
    return _estimate(pairs, lambda values, _: np.percentile(values, PERCENTILES, axis=-1)) if pairs else None


def paired_ratio(numerator: Samples, denominator: Samples) -> tuple[Estimate | None, ...] | None:
    """The ratio of each of `PERCENTILES`, over the requests that have a value in both; None as in `percentiles`.

    Args:
        numerator, denominator: the same repetitions of the same requests, in two modes.
    """
    pairs = []
    for above, below in zip(numerator, denominator, strict=True):
        both = [(a, b) for a, b in zip(above, below, strict=True) if a is not None and b is not None]
        if both:
            a, b = np.array(both, dtype=np.float64).T
            pairs.append((a, b))
    return _estimate(pairs, _ratio_of_percentiles) if pairs else None


def _ratio_of_percentiles(above: _Floats, below: _Floats) -> _Floats:
    upper, lower = (np.maximum(np.percentile(each, PERCENTILES, axis=-1), _RESOLUTION) for each in (above, below))
    ratio: _Floats = upper / lower
    return ratio


def _estimate(pairs: Sequence[tuple[_Floats, _Floats]], statistic: _Statistic) -> tuple[Estimate | None, ...]:
    """The median over repetitions of `statistic`, which maps (..., requests) twice to (percentiles, ...)."""
    fewest = min(a.size for a, _ in pairs)
    values = np.median([statistic(a, b) for a, b in pairs], axis=0)
    generator = np.random.default_rng(_SEED)
    drawn = np.empty((len(pairs), len(values), _DRAWS))
    for slot in range(len(pairs)):
        chosen = generator.integers(len(pairs), size=_DRAWS)
        for repetition, (a, b) in enumerate(pairs):
            where = np.flatnonzero(chosen == repetition)
            requests = generator.integers(a.size, size=(where.size, a.size))
            drawn[slot][:, where] = statistic(a[requests], b[requests])
    tail = (100 - _LEVEL) / 2
    lows, highs = np.percentile(np.median(drawn, axis=0), (tail, 100 - tail), axis=-1)
    return tuple(
        Estimate(float(value), float(low), float(high))
        if percentile == PERCENTILES[0] or fewest >= least_requests(percentile)
        else None
        for percentile, value, low, high in zip(PERCENTILES, values, lows, highs, strict=True)
    )


def _known(values: Sequence[float | None]) -> _Floats:
    return np.array([value for value in values if value is not None], dtype=np.float64)
