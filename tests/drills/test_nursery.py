"""Engines are forked from a nursery, one life after the other; here the engine is a small program."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from kvberth.drills.nursery import _Nursery

PROGRAM = """
import os, subprocess, sys, time
from kvberth.drills import nursery_process

def run(arguments):
    if arguments == ["fail"]:
        print("no such model", file=sys.stderr, flush=True)
        os._exit(3)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("an engine with", *arguments, flush=True)
    time.sleep(600)

nursery_process._import_engine = lambda: print("imported", flush=True)
nursery_process._run = run
nursery_process.main()
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "engine.log"


@pytest.fixture
def nursery(log) -> Iterator[_Nursery]:
    with log.open("ab") as output:
        made = _Nursery([sys.executable, "-c", PROGRAM], dict(os.environ), output)
    yield made
    made.stdin.close()
    made.wait()


def wait_until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def family(nursery: _Nursery) -> list[psutil.Process]:
    """Once the engine and its child are there."""
    wait_until(lambda: len(psutil.Process(nursery.pid).children(recursive=True)) == 2, "its family is there")
    return psutil.Process(nursery.pid).children(recursive=True)


def test_one_life_follows_the_other(nursery, log):
    """A killed engine's children end with it, and the next one is forked from the same nursery."""
    pids = set()
    for life in ("one", "two"):
        nursery.begin([life])
        engine, child = family(nursery)
        assert nursery.poll() is None
        engine.send_signal(signal.SIGKILL)
        wait_until(lambda: nursery.poll() is not None, "the end is told")
        assert nursery.poll() == 128 + signal.SIGKILL
        assert not child.is_running()
        pids.add(engine.pid)
    assert len(pids) == 2
    assert log.read_text().splitlines() == ["imported", "an engine with one", "an engine with two"]


def test_an_engine_that_fails_says_why(nursery, log):
    """With its status, and in its log."""
    nursery.begin(["fail"])
    wait_until(lambda: nursery.poll() is not None, "the end is told")
    assert nursery.poll() == 3
    assert log.read_text().splitlines() == ["imported", "no such model"]


def test_engine_and_nursery_end_with_the_pipe(nursery):
    """As when the launcher dies."""
    nursery.begin(["one"])
    members = family(nursery)
    nursery.stdin.close()
    wait_until(lambda: nursery.poll() is not None, "the nursery has ended")
    assert nursery.poll() == 0
    assert not any(each.is_running() for each in members)


def test_nursery_that_cannot_start_is_an_engine_that_has_ended(log):
    """Its last words are in the log."""
    with log.open("ab") as output:
        nursery = _Nursery([sys.executable, "-c", "raise SystemExit('no vLLM here')"], dict(os.environ), output)
    with contextlib.suppress(BrokenPipeError):
        nursery.begin(["one"])
    wait_until(lambda: nursery.poll() is not None, "the end is told")
    assert nursery.poll() == 1
    assert "no vLLM here" in log.read_text()
    with contextlib.suppress(BrokenPipeError):
        nursery.stdin.close()
