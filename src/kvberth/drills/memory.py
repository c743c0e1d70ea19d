"""Whether memory grows: a line through what each process used, minute after minute. No I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvberth.drills.states import ProcessState

__all__ = ["MemorySample", "MemoryTrend", "memory_objections", "memory_trends"]

_SETTLING_SHARE = 0.25
"""Of the samples, the first: allocators and pools grow to their size before they stay at it."""
_LEAST_SAMPLES = 4
_LEAST_HOURS = 0.25
"""A line through less says nothing of hours: an engine that has just been started still grows to its size."""
_TOLERATED_SHARE_PER_HOUR = 0.02
"""Of what the process uses. An engine of 1.2 GB that leaked 1 kB per request would pass it at 7 requests per second."""
_T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t at 97.5%, for 1 degree of freedom and more."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """All processes at one moment without requests, in seconds from the start."""

    at: float
    processes: Mapping[str, ProcessState]


class MemoryTrend(msgspec.Struct, frozen=True, kw_only=True):
    """One process, from its start to its end or the run's.

    Attributes:
        bytes_per_hour: slope of the line of least squares.
        error_bytes_per_hour: standard error of it.
        mean_bytes: of what it used.
        used: what it used when, in bytes and seconds from the run's start; `samples`, `hours` and the line are of the
            later part of it.
    """

    name: str
    samples: int
    hours: float
    mean_bytes: float
    bytes_per_hour: float
    error_bytes_per_hour: float
    used: list[tuple[float, float]] = []

    @property
    def is_judged(self) -> bool:
        """Whether it was followed for long enough to say that it grows."""
        return self.hours >= _LEAST_HOURS

    @property
    def interval(self) -> tuple[float, float]:
        """In which the slope is, with a confidence of 95%."""
        freedom = self.samples - 2
        quantile = _T_QUANTILES[freedom - 1] if freedom <= len(_T_QUANTILES) else 1.96 + 2.5 / freedom
        margin = quantile * self.error_bytes_per_hour
        return self.bytes_per_hour - margin, self.bytes_per_hour + margin

    @property
    def is_growing(self) -> bool:
        """Beyond doubt (all of the interval) and beyond what is tolerated."""
        return self.is_judged and self.interval[0] > _TOLERATED_SHARE_PER_HOUR * self.mean_bytes


def memory_trends(samples: Sequence[MemorySample]) -> list[MemoryTrend]:
    """Of each process that was seen often enough; one that was started anew counts as another."""
    by_process: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for sample in samples:
        for name, process in sample.processes.items():
            by_process.setdefault((name, process.pid), []).append((sample.at, float(process.rss_bytes)))
    trends = []
    for (name, _), points in by_process.items():
        settled = points[math.ceil(_SETTLING_SHARE * len(points)) :]
        if len(settled) >= _LEAST_SAMPLES:
            trends.append(_trend(name, points, settled))
    return trends


def memory_objections(trends: Sequence[MemoryTrend]) -> list[str]:
    """A line for each process that grows."""
    return [
        f"{each.name} grows by {each.bytes_per_hour / 1e6:.1f} MB per hour "
        f"({each.interval[0] / 1e6:.1f} to {each.interval[1] / 1e6:.1f})"
        for each in trends
        if each.is_growing
    ]


def _trend(name: str, points: list[tuple[float, float]], settled: Sequence[tuple[float, float]]) -> MemoryTrend:
    hours, used = np.array([[at / 3600, rss] for at, rss in settled]).T
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    slope = float(centred @ used) / spread
    residuals = used - used.mean() - slope * centred
    variance = float(residuals @ residuals) / (len(settled) - 2)
    return MemoryTrend(
        name=name,
        samples=len(settled),
        hours=float(hours[-1] - hours[0]),
        mean_bytes=float(used.mean()),
        bytes_per_hour=slope,
        error_bytes_per_hour=math.sqrt(variance / spread),
        used=[(round(at, 1), rss) for at, rss in points],
    )
