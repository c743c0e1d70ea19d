"""Signals that end long work."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["terminate_like_ctrl_c"]


@contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, wherever the program is: in an event loop it is the loop's own Ctrl-C.

    A job that a script puts into the background ignores Ctrl-C, and must not ignore SIGTERM with it. There the
    interrupt is raised by the loop itself: in the middle of whatever runs somebody might take it for a fault of his.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise KeyboardInterrupt from None
        loop.call_soon_threadsafe(_interrupt)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt() -> None:
    raise KeyboardInterrupt
