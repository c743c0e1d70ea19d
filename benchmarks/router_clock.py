"""Timers finer than those of an event loop, whose milliseconds would be most of what the router adds.

What is sent on such a timer falls on its milliseconds, and what a router adds before the next one is lost.
"""

import asyncio
import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Clock"]

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    """`struct itimerspec`: an interval, which is not used, and when."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_seconds", "every_nanos", "seconds", "nanos")]


class Clock:
    """Calls by a timerfd of Linux, for the thread of one event loop; times are those of `time.monotonic`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._spec = _Spec()
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._fire)

    def call_at(self, when: float, function: Callable[..., None], *arguments: Any) -> None:
        """At once if that has passed, but not from here."""
        call = (when, next(self._order), function, arguments)
        heapq.heappush(self._calls, call)
        if self._calls[0] is call:
            self._arm(when)

    async def sleep_until(self, when: float) -> None:
        """Nothing may cancel it."""
        done = asyncio.get_running_loop().create_future()
        self.call_at(when, done.set_result, None)
        await done

    def _arm(self, when: float) -> None:
        nanos = max(1, int(when * 1e9))
        self._spec.seconds, self._spec.nanos = divmod(nanos, 1_000_000_000)
        _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)

    def _fire(self) -> None:
        os.read(self._fd, 8)
        now = time.monotonic()
        while self._calls and self._calls[0][0] <= now:
            _, _, function, arguments = heapq.heappop(self._calls)
            function(*arguments)
        if self._calls:
            self._arm(self._calls[0][0])
