"""The accelerator's stream: steps in order, each with a duration, run while the host may be ahead.

    host     launch 1   launch 2    wait for 1 ....... launch 3   wait for 2 ....
    device              |------- step 1 -------|------- step 2 -------|
    work                                   [w1]                   [w2]

A step begins when the one before it ends, or when it is launched if that is later, as on a device's stream. Its work
(words written and verified) is done within its time and as late as possible: who reads the cache too early finds it as
a real device would leave it, not yet written.

Who owns what: the engine's thread launches; the device's thread (`Device`) runs the steps and nothing else touches what
their work touches; any thread may wait for a step or ask an `Event`. A host that is held up, by a long post or by
anything else, does not hold up the device.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Device", "Event", "LaunchedStep", "Stream"]

T = TypeVar("T")

logger = logging.getLogger("vllm.kvberth.emulator")

_MARGIN_SECONDS = 200e-6
"""Sleeps end this much late at times; work is begun as much earlier."""
_JOIN_SECONDS = 5.0


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
        self.begin = begin
        self.end = end
        self._work = work
        self._cost_seconds = cost_seconds
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def result(self) -> T:
        """Wait until the step is done, and return what its work has made, or raise what it has raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value] # set before `_done`

    def event(self) -> Event:
        """Done with the step."""
        return Event(self._done)


class Stream(Generic[T]):
    """One device's stream. `run_next` is for the one thread that runs it.

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
        # Protects the two below.
        self._changed = threading.Condition()
        self._pending: deque[LaunchedStep[T]] = deque()
        self._is_closed = False
        self.busy_seconds = 0.0
        self.late_seconds = 0.0
        """By how much results were late in all: work that took longer than its step, or a processor that was not
        free."""

    def launch(self, duration: float, work: Callable[[], T], cost_seconds: float = 0.0) -> LaunchedStep[T]:
        """Put a step behind the others; returns at once. The host's thread.

        Args:
            duration: of the step, in seconds.
            work: what to do within it.
            cost_seconds: how long the work is expected to take on this machine.
        """
        begin = max(self._clock(), self._free_at)
        self._free_at = begin + duration
        self.busy_seconds += duration
        step = LaunchedStep(work, cost_seconds, begin, self._free_at)
        with self._changed:
            self._pending.append(step)
            self._changed.notify()
        return step

    def record(self) -> Event:
        """An event behind all that has been launched."""
        with self._changed:
            if self._pending:
                return self._pending[-1].event()
        done = threading.Event()
        done.set()
        return Event(done)

    def run_next(self) -> bool:
        """Run the oldest step, when there is one; False when the stream is closed."""
        with self._changed:
            while not self._pending:
                if self._is_closed:
                    return False
                self._changed.wait()
            step = self._pending[0]
        self._sleep_until(step.end - step._cost_seconds - _MARGIN_SECONDS)
        try:
            step._result = step._work()
        except BaseException as error:  # it belongs to whoever waits for the step
            step._error = error
        self._sleep_until(step.end)
        self.late_seconds += max(0.0, self._clock() - step.end - _MARGIN_SECONDS)
        with self._changed:
            self._pending.popleft()
        step._done.set()
        return True

    def close(self) -> None:
        """No more steps: `run_next` returns False once those that are left have been run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _sleep_until(self, moment: float) -> None:
        remaining = moment - self._clock()
        if remaining > 0:
            self._sleep(remaining)


class Device(Generic[T]):
    """The thread that runs a stream."""

    def __init__(self, stream: Stream[T]) -> None:
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name="kvb-emu-device", daemon=True)

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    def stop(self) -> None:
        """Run what is left, and end."""
        self._stream.close()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            logger.warning("the emulated device is still busy after %g s", _JOIN_SECONDS)

    def _run(self) -> None:
        while self._stream.run_next():
            pass
