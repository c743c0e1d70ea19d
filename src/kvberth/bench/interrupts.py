"""Ctrl-C and SIGTERM while an event loop is made, runs, and ends."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, Self, TypeVar

__all__ = ["Interrupts"]

_Result = TypeVar("_Result")


class Interrupts:
    """As a context, around an `asyncio.Runner`: what would be raised by a signal is raised when the loop is gone.

    A `KeyboardInterrupt` in the middle of whatever runs may be taken for a fault by who catches everything, as parsers
    of HTTP do, and leaves half a loop behind where it comes at a loop's beginning or end. `asyncio.Runner` guards
    against that only while its work runs, and only for SIGINT. Here the work is cancelled, so that it can clean up.

    Signals that are ignored, or end the process, do so still.
    """

    def __init__(self) -> None:
        self._is_interrupted = False
        self._cancel: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._is_interrupted:
            raise KeyboardInterrupt from None

    async def heed(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Do the work, until there is an interrupt."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self._is_interrupted:
                raise asyncio.CancelledError
            return await work()
        finally:
            self._cancel = None

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._cancel is not None:
            self._cancel()
