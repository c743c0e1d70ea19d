"""How an event loop is interrupted."""

import asyncio
import contextlib
import gc
import random
import signal
from collections.abc import Iterator
from itertools import repeat

import pytest
import uvloop

from kvberth.bench import Interrupts
from kvberth.cli.signals import terminate_like_ctrl_c

SIGNALS = [signal.SIGINT, signal.SIGTERM]
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(autouse=True)
def as_a_command() -> Iterator[None]:
    """In the foreground, also where the tests themselves run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with terminate_like_ctrl_c():
        yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def runner(new_loop=uvloop.new_event_loop):
    with Interrupts() as interrupts, asyncio.Runner(loop_factory=new_loop) as loop:
        yield lambda work: loop.run(interrupts.heed(work))


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("number", SIGNALS)
def test_work_cleans_up_whatever_it_was_at(new_loop, number):
    """The signal comes where everything is caught, as HTTP parsers do."""
    has_cleaned_up = False

    async def work() -> None:
        nonlocal has_cleaned_up
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        try:
            await asyncio.sleep(5)
        finally:
            has_cleaned_up = True

    with pytest.raises(KeyboardInterrupt), runner(new_loop) as run:
        run(work)
    assert has_cleaned_up


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_loop_is_there(number):
    """Nothing is begun."""

    def interrupted():
        signal.raise_signal(number)
        return uvloop.new_event_loop()

    with pytest.raises(KeyboardInterrupt), runner(interrupted) as run, pytest.raises(asyncio.CancelledError):
        run(lambda: pytest.fail("has begun"))


def test_behind_the_work():
    """What comes of it is known by then, and the interrupt is raised all the same."""
    results = []

    def work():
        with runner() as run:
            results.append(run(lambda: asyncio.sleep(0, "done")))
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert results == ["done"]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_sigterm_ends_a_job_in_the_background(new_loop):
    """There Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(5)

    with pytest.raises(KeyboardInterrupt), runner(new_loop) as run:
        run(work)


def test_signals_are_what_they_were_before():
    """Also one that is ignored in the meantime."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        of_sigterm = signal.getsignal(signal.SIGTERM)
        with runner() as run:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert run(lambda: asyncio.sleep(0, "done")) == "done"
        assert signal.getsignal(signal.SIGTERM) is of_sigterm
    finally:
        signal.signal(signal.SIGINT, before)


def test_at_any_moment(recwarn, capfd):
    """From the loop's making to its end: an interrupt, or none, and nothing left behind."""

    def once(delay: float) -> bool:
        try:
            try:
                with runner() as run:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    run(lambda: asyncio.sleep(0.0003))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    chance = random.Random(1)  # noqa: S311 - no secret
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        interrupted = [once(chance.uniform(1e-6, 0.002)) for _ in repeat(None, 500)]
    finally:
        signal.signal(signal.SIGALRM, before)
    gc.collect()
    assert sum(interrupted) > 50
    assert not list(recwarn)
    assert capfd.readouterr().err == ""
