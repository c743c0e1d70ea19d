"""Figures with their uncertainty, from repeated measurements. Pure.

A figure of a cell is the **median over repetitions** of that repetition's percentile. A ratio of two modes is the
median over repetitions of the ratio within each: what a machine does to all of one repetition cancels. Both modes had
the same requests, so a request that is resampled is resampled in both.

Intervals are 95% percentile intervals of a two-level bootstrap (Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 3.8): repetitions are drawn, and within each the requests. scipy's bootstrap has one level.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["PERCENTILES", "Estimate", "Samples", "paired_ratio", "percentiles"]

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


def percentiles(samples: Samples) -> tuple[Estimate, ...] | None:
    """`PERCENTILES` of one quantity, interpolated linearly as numpy does; None where there is no value."""
    known = [_known(repetition) for repetition in samples]
    pairs = [(values, values) for values in known if values.size]
    return _estimate(pairs, lambda values, _: np.percentile(values, PERCENTILES, axis=-1)) if pairs else None


def paired_ratio(numerator: Samples, denominator: Samples) -> tuple[Estimate, ...] | None:
    """The ratio of each of `PERCENTILES`, over the requests that have a value in both.

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


def _estimate(pairs: Sequence[tuple[_Floats, _Floats]], statistic: _Statistic) -> tuple[Estimate, ...]:
    """The median over repetitions of `statistic`, which maps (..., requests) twice to (figures, ...)."""
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
    return tuple(Estimate(*(float(each) for each in figure)) for figure in zip(values, lows, highs, strict=True))


def _known(values: Sequence[float | None]) -> _Floats:
    return np.array([value for value in values if value is not None], dtype=np.float64)
