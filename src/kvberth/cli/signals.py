"""Signals that end long work."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["terminate_like_ctrl_c"]


@contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, wherever the program is: in an event loop it is the loop's own Ctrl-C.

    A job that a script puts into the background ignores Ctrl-C, and must not ignore SIGTERM with it.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
