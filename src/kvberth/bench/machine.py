"""The machine a measurement ran on: how idle it was meanwhile, and what it is."""

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import psutil

__all__ = ["IdleMeter", "machine", "versions"]

_MEASURING = ("kvberth", "aiohttp", "uvloop", "numpy", "msgspec")
"""Distributions whose version can change a figure."""


def _read_cpu_times() -> tuple[float, float]:
    """Seconds that all cores together have been idle, and have been at all, since the machine started.

    Waiting for a disk is idle. Linux counts a guest's time within the user's.
    """
    times = psutil.cpu_times()
    total = times.user + times.nice + times.system + times.idle + times.iowait + times.irq + times.softirq + times.steal
    return times.idle + times.iowait, total


class IdleMeter:
    """How idle the cores are between the first and the last call of `sample`.

    In a container these are the cores of the whole machine, whatever the container may use of them.
    """

    def __init__(self, read: Callable[[], tuple[float, float]] = _read_cpu_times) -> None:
        self._read = read
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    def sample(self) -> None:
        self._last = self._read()
        self._first = self._first or self._last

    @property
    def idle_share(self) -> float | None:
        """From 0 to 1; None while no time has passed."""
        if self._first is None or self._last[1] <= self._first[1]:
            return None
        share = (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])
        return max(0.0, min(1.0, share))  # the kernel's counters of idle time can step back a little


def versions() -> dict[str, str | None]:
    """Of Python and of what measures; None for what is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _MEASURING}


def machine() -> dict[str, str | int | None]:
    """What a reader of the figures wants to know of the machine; nothing that names it."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
