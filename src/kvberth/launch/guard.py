"""Runs one command and takes its whole family down with it.

    launcher --pipe--> guard --> vLLM's API server --> EngineCore --> workers

The guard ends the family when the command ends, and when the launcher does: then the pipe on its standard input closes,
even if the launcher was killed. Descendants whose parent has died are handed to the guard by the kernel, so that none
escapes. It imports nothing of ours, to be small and to live as long as anything.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

__all__ = ["PR_SET_CHILD_SUBREAPER", "end_family", "watch_over"]

PR_SET_CHILD_SUBREAPER = 36
_GRACE_SECONDS = 10.0


def end_family() -> None:
    """SIGTERM to every descendant of this process, once, and SIGKILL to those that are still there after the grace."""
    me = psutil.Process()
    asked: set[psutil.Process] = set()
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        _reap()
        family = set(me.children(recursive=True))
        if not family:
            return
        # Again and again, since an engine that is still starting has children after it was asked to end.
        for process in family - asked:
            _signal(process, signal.SIGTERM)
        asked |= family
        time.sleep(0.05)
    for process in me.children(recursive=True):
        _signal(process, signal.SIGKILL)
    time.sleep(0.1)
    _reap()


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _reap() -> None:
    """Collect descendants that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main(command: list[str]) -> int:
    """Run `command` until it, or the launcher, ends; returns its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides, by closing the pipe
    return watch_over(child.pid, sys.stdin.fileno())


def watch_over(child: int, launcher: int) -> int:
    """Until the child, or the launcher's pipe, has ended; then its family ends too. Returns the child's exit status."""
    child_ended = os.pidfd_open(child)
    ready, _, _ = select.select([launcher, child_ended], [], [])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child_ended in ready else 0
    end_family()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
