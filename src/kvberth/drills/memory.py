"""Whether memory grows: a line through what each process used, minute after minute. No I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvberth.drills.states import ProcessState

__all__ = ["MemorySample", "MemoryTrend", "Slope", "memory_objections", "memory_trends"]

_SETTLING_SHARE = 0.25
"""Of the samples, the first: allocators and pools grow to their size before they stay at it."""
_PARTS = 3
"""Of what is judged. A leak goes on in each of them; a pool that is filled once more than ever before grows in one."""
_LEAST_SAMPLES_OF_PART = 4
_LEAST_HOURS = 0.25
"""A line through less says nothing of hours: an engine that has just been started still grows to its size."""
_TOLERATED_SHARE_PER_HOUR = 0.02
"""Of what the process uses. An engine of 1.2 GB that leaked 1 kB per request would pass it at 7 requests per second."""
_LEAST_TOLERATED_BYTES_PER_HOUR = 8e6
"""For small processes: two of Python's arenas of 1 MiB in a quarter of an hour, less than which is no line."""
_T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t at 97.5%, for 1 degree of freedom and more."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """All processes at one moment without requests, in seconds from the start."""

    at: float
    processes: Mapping[str, ProcessState]


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """Of the line of least squares through some samples, with its standard error."""

    samples: int
    bytes_per_hour: float
    error_bytes_per_hour: float

    @property
    def interval(self) -> tuple[float, float]:
        """In which the slope is, with a confidence of 95%."""
        freedom = self.samples - 2
        quantile = _T_QUANTILES[freedom - 1] if freedom <= len(_T_QUANTILES) else 1.96 + 2.5 / freedom
        margin = quantile * self.error_bytes_per_hour
        return self.bytes_per_hour - margin, self.bytes_per_hour + margin


class MemoryTrend(msgspec.Struct, frozen=True, kw_only=True):
    """One process, from its start to its end or the run's.

    Attributes:
        mean_bytes: of what it used.
        slope: of all samples after the first quarter, which took so many hours.
        parts: the same of each third of them, one after the other; none where there are too few samples.
        used: what it used when, in bytes and seconds from the run's start, the first quarter too.
    """

    name: str
    hours: float
    mean_bytes: float
    slope: Slope
    parts: list[Slope]
    used: list[tuple[float, float]] = []

    @property
    def is_judged(self) -> bool:
        """Whether it was followed for long enough to say that it grows."""
        return self.hours >= _LEAST_HOURS and bool(self.parts)

    @property
    def is_growing(self) -> bool:
        """Beyond doubt (all of the interval) and beyond what is tolerated, from the beginning to the end."""
        tolerated = max(_TOLERATED_SHARE_PER_HOUR * self.mean_bytes, _LEAST_TOLERATED_BYTES_PER_HOUR)
        return self.is_judged and all(each.interval[0] > tolerated for each in (self.slope, *self.parts))


def memory_trends(samples: Sequence[MemorySample]) -> list[MemoryTrend]:
    """Of each process that was seen often enough; one that was started anew counts as another."""
    by_process: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for sample in samples:
        for name, process in sample.processes.items():
            by_process.setdefault((name, process.pid), []).append((sample.at, float(process.rss_bytes)))
    trends = []
    for (name, _), points in by_process.items():
        settled = points[math.ceil(_SETTLING_SHARE * len(points)) :]
        if len(settled) >= _LEAST_SAMPLES_OF_PART:
            trends.append(_trend(name, points, settled))
    return trends


def memory_objections(trends: Sequence[MemoryTrend]) -> list[str]:
    """A line for each process that grows."""
    return [
        f"{each.name} grows by {each.slope.bytes_per_hour / 1e6:.1f} MB per hour "
        f"({each.slope.interval[0] / 1e6:.1f} to {each.slope.interval[1] / 1e6:.1f})"
        for each in trends
        if each.is_growing
    ]


def _trend(name: str, points: list[tuple[float, float]], settled: Sequence[tuple[float, float]]) -> MemoryTrend:
    hours, used = np.array([[at / 3600, rss] for at, rss in settled]).T
    parts = zip(np.array_split(hours, _PARTS), np.array_split(used, _PARTS), strict=True)
    has_parts = len(settled) >= _PARTS * _LEAST_SAMPLES_OF_PART
    return MemoryTrend(
        name=name,
        hours=float(hours[-1] - hours[0]),
        mean_bytes=float(used.mean()),
        slope=_slope(hours, used),
        parts=[_slope(*part) for part in parts] if has_parts else [],
        used=[(round(at, 1), rss) for at, rss in points],
    )


def _slope(hours: NDArray[np.float64], used: NDArray[np.float64]) -> Slope:
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    slope = float(centred @ used) / spread
    residuals = used - used.mean() - slope * centred
    variance = float(residuals @ residuals) / (len(hours) - 2)
    return Slope(samples=len(hours), bytes_per_hour=slope, error_bytes_per_hour=math.sqrt(variance / spread))
