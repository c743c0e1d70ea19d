"""When requests come. No I/O and no clock."""

from enum import StrEnum

import numpy as np

__all__ = ["Arrivals", "arrival_seconds"]


class Arrivals(StrEnum):
    """With exponential gaps, as from many independent users; at a fixed rate; or at the times of a trace."""

    POISSON = "poisson"
    UNIFORM = "uniform"
    TRACE = "trace"


def arrival_seconds(arrivals: Arrivals, rate: float, count: int, seed: np.random.SeedSequence) -> list[float]:
    """Times of `count` arrivals, in order; the first comes at 0.

    Arrival i depends on the rate, the seed and i only. The gaps are those of rate 1, scaled: another rate is the same
    traffic, stretched.
    """
    if arrivals == Arrivals.UNIFORM:
        return [index / rate for index in range(count)]
    assert arrivals == Arrivals.POISSON, "a trace has times of its own"
    gaps = np.random.default_rng(seed).exponential(size=count - 1)
    return [0.0, *(np.cumsum(gaps) / rate).tolist()]
