"""How long work is ended."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest
import uvloop

from kvberth.cli.signals import terminate_like_ctrl_c


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def job(request) -> Iterator[None]:
    """In the background of a script Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("job")
def test_sigterm_ends_it():
    """Afterwards all is as it was."""
    of_sigterm = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_like_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is of_sigterm


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_sigterm_ends_an_event_loop_whatever_it_is_at(new_loop):
    """It comes where everything is caught, as HTTP parsers do; what runs can clean up behind it."""
    has_cleaned_up = False

    async def work() -> None:
        nonlocal has_cleaned_up
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(5)
        finally:
            has_cleaned_up = True

    with (
        pytest.raises(KeyboardInterrupt),
        terminate_like_ctrl_c(),
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        runner.run(work())
    assert has_cleaned_up
