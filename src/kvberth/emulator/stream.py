"""The accelerator's stream: steps in order, each with a duration, run while the host may be ahead.

Who owns what: the engine's thread launches steps and collects them, and nobody else does; it also does the work of a
step, since nothing else is to do while it waits for it. Another thread may only ask an `Event` whether a step is done,
or wait for it.

    host     launch 1   launch 2    collect 1 ........ launch 3   collect 2 ....
    device              |------- step 1 -------|------- step 2 -------|
    work                                   [w1]                   [w2]

A step begins when the one before it ends, or when it is launched if that is later, as on a device's stream. Its work
(words written and verified) is done within its time and as late as possible: who reads the cache too early finds it as
a real device would leave it, not yet written.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Event", "LaunchedStep", "Stream"]

T = TypeVar("T")

_MARGIN_SECONDS = 200e-6
"""Sleeps end this much late at times; work is begun as much earlier."""


class Event:
    """Recorded behind the steps that have been launched; done when they are. Any thread may ask and wait."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def query(self) -> bool:
        """Whether the steps are done."""
        return self._done.is_set()

    def synchronize(self) -> None:
        """Wait until they are."""
        self._done.wait()


class LaunchedStep(Generic[T]):
    """A step on the stream."""

    def __init__(self, work: Callable[[], T], cost_seconds: float, begin: float, end: float) -> None:
        self.work = work
        self.cost_seconds = cost_seconds
        self.begin = begin
        self.end = end
        self.done = threading.Event()
        self.result: T | None = None


class Stream(Generic[T]):
    """One device's stream.

    Args:
        clock: seconds, monotonic.
        sleep: gives the processor back for so many seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._pending: deque[LaunchedStep[T]] = deque()
        self.busy_seconds = 0.0
        self.late_seconds = 0.0
        """By how much results were late in all: work that took longer than its step, or a host that was not there."""

    def launch(self, duration: float, work: Callable[[], T], cost_seconds: float = 0.0) -> LaunchedStep[T]:
        """Put a step behind the others; returns at once.

        Args:
            duration: of the step, in seconds.
            work: what to do within it.
            cost_seconds: how long the work is expected to take on this machine.
        """
        begin = max(self._clock(), self._free_at)
        self._free_at = begin + duration
        self.busy_seconds += duration
        step = LaunchedStep(work, cost_seconds, begin, self._free_at)
        self._pending.append(step)
        return step

    def collect(self, step: LaunchedStep[T]) -> T:
        """Wait until the step is done, and return what its work has made. Earlier steps are done before it."""
        while not step.done.is_set():
            self._run(self._pending.popleft())
        return step.result  # type: ignore[return-value] # set by _run

    def record(self) -> Event:
        """An event behind all that has been launched."""
        if self._pending:
            return Event(self._pending[-1].done)
        done = threading.Event()
        done.set()
        return Event(done)

    def drain(self) -> None:
        """Do all steps that are left."""
        while self._pending:
            self._run(self._pending.popleft())

    def _run(self, step: LaunchedStep[T]) -> None:
        self._sleep_until(step.end - step.cost_seconds - _MARGIN_SECONDS)
        step.result = step.work()
        self._sleep_until(step.end)
        self.late_seconds += max(0.0, self._clock() - step.end - _MARGIN_SECONDS)
        step.done.set()

    def _sleep_until(self, moment: float) -> None:
        remaining = moment - self._clock()
        if remaining > 0:
            self._sleep(remaining)
