"""Signals that end long work."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["terminate_like_ctrl_c"]


@contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, also to a job that a script has put into the background, where Ctrl-C is ignored.

    Event loops in it want `kvberth.bench.Interrupts`.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
