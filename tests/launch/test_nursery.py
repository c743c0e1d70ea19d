"""Engines are forked from a nursery that they share; here an engine is a small program."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvberth.launch import Nurseries
from kvberth.launch.nursery import ForkedGuard

PROGRAM = """
import os, subprocess, sys, time
from kvberth.launch import nursery_process

def imports():
    if os.environ["NAME"] == "broken":
        sys.exit("no module of that name")
    print("imported for", os.environ["NAME"], flush=True)

def run(arguments):
    if arguments == ["fail"]:
        print("no such model", file=sys.stderr, flush=True)
        os._exit(3)
    print("an engine with", *arguments, "is", os.environ["NAME"], flush=True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)

nursery_process._import_engine = imports
nursery_process._run = run
nursery_process.main()
"""
PREFIX = (sys.executable, "-c", PROGRAM)
"""What stands behind it, the nursery's own command, are arguments that it ignores."""

Fork = Callable[..., ForkedGuard]


@pytest.fixture
def nurseries() -> Iterator[Nurseries]:
    made = Nurseries()
    yield made
    made.close()


@pytest.fixture
def fork(nurseries: Nurseries, tmp_path: Path) -> Iterator[Fork]:
    """An engine by its name, which its log has too."""
    guards: list[ForkedGuard] = []

    def make(name: str, *arguments: str) -> ForkedGuard:
        with (tmp_path / name).open("ab") as log:
            guards.append(nurseries.fork(PREFIX, arguments, {**os.environ, "NAME": name}, log))
        return guards[-1]

    yield make
    for guard in guards:
        guard.stdin.close()
        guard.wait()


def wait_until(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def family(guard: ForkedGuard) -> list[psutil.Process]:
    """The engine and its child, once they are there."""
    wait_until(lambda: len(psutil.Process(guard.pid).children(recursive=True)) == 2, "its family is there")
    return psutil.Process(guard.pid).children(recursive=True)


def test_engines_are_forked_from_one_nursery(fork, tmp_path):
    """Each with its arguments, its environment and its log; the first one's log has what the nursery says."""
    guards = [fork("a", "--port", "1"), fork("b", "--port", "2")]
    for guard in guards:
        family(guard)
        assert guard.poll() is None
    assert (tmp_path / "a").read_text().splitlines() == ["imported for a", "an engine with --port 1 is a"]
    assert (tmp_path / "b").read_text().splitlines() == ["an engine with --port 2 is b"]


def test_a_killed_engine_s_family_ends_with_it(fork):
    """Others live on, and the next one is forked from the same nursery."""
    first, other = fork("a", "one"), fork("b", "two")
    engine, child = family(first)
    family(other)
    engine.send_signal(signal.SIGKILL)
    wait_until(lambda: first.poll() is not None, "the end is told")
    assert first.poll() == first.wait() == 128 + signal.SIGKILL
    assert not child.is_running()
    assert other.poll() is None
    next_engine, _ = family(fork("a", "three"))
    assert next_engine.pid != engine.pid


def test_an_engine_ends_with_the_launcher_s_pipe(fork):
    """Its family too."""
    guard = fork("a", "one")
    processes = family(guard)
    guard.stdin.close()
    assert guard.wait() == 0
    assert not any(each.is_running() for each in processes)


def test_an_engine_that_fails_says_why(fork, tmp_path):
    """With its status, and in its log."""
    guard = fork("a", "fail")
    assert guard.wait() == guard.poll() == 3
    assert (tmp_path / "a").read_text().splitlines() == ["imported for a", "no such model"]


def test_an_engine_lives_on_without_its_nursery(fork, nurseries):
    """And one that is wanted later has a new one."""
    first = fork("a", "one")
    family(first)
    nurseries.close()
    second = fork("b", "two")
    family(second)
    assert first.poll() is None


def test_a_nursery_that_cannot_import_ends_its_engines(fork, tmp_path):
    """Before they are there; the next one gets a nursery that can."""
    guard = fork("broken", "one")
    assert guard.wait() != 0
    assert guard.pid == 0
    assert (tmp_path / "broken").read_text() == "no module of that name\n"
    guard.kill()
    family(fork("a", "two"))


def test_a_killed_guard_is_noticed(fork):
    """As the guard of any other engine."""
    guard = fork("a", "one")
    processes = family(guard)
    guard.kill()
    assert guard.wait() == -signal.SIGKILL
    for process in processes:
        process.kill()
