"""One process of a cluster: started behind a guard, logged to a file, stopped with its whole family."""

import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

__all__ = ["Guard", "LaunchError", "ManagedProcess"]

_TAIL_LINES = 20
_STOP_SECONDS = 15.0


class LaunchError(RuntimeError):
    """A process of the cluster did not start, or has died; the text ends with the tail of its log."""


class Guard(Protocol):
    """What stands between us and the process, and ends with it: of `subprocess.Popen` what is used here."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class ManagedProcess:
    """Starts nothing before `start`. Owned by one thread.

    Args:
        name: for people, such as `prefill-0`.
        command: what to run.
        env: its whole environment.
        log: the file for its output.
        url: where it answers `GET /health` when it is ready.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, url: str) -> None:
        self.name = name
        self.url = url
        self.log = log
        self._command = list(command)
        self._env = dict(env)
        self._guard: Guard | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        with self.log.open("ab") as log:
            self._guard = self._new_guard(log)

    def _new_guard(self, log: IO[bytes]) -> Guard:
        self._close_guard()
        guard = [sys.executable, "-m", "kvberth.launch.guard", *self._command]
        return subprocess.Popen(
            guard, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._env, start_new_session=True
        )

    def _close_guard(self) -> None:
        """Of a life before, which has ended."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    @property
    def is_alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def family(self) -> list[psutil.Process]:
        """The process and its descendants, the process first; empty once it has ended."""
        if self._guard is None or self._guard.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._guard.pid).children(recursive=True)
        return []

    @property
    def pid(self) -> int:
        """Of the process itself.

        Raises:
            LaunchError: it is not running.
        """
        if not (family := self.family):
            raise LaunchError(f"{self.name} is not running")
        return family[0].pid

    def is_ready(self) -> bool:
        """Whether it answers that it is well.

        Raises:
            LaunchError: it has ended.
        """
        self.check()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:  # noqa: S310 - our own URL
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, OSError):
            return False

    def check(self) -> None:
        """Do nothing while it lives.

        Raises:
            LaunchError: it has ended.
        """
        if self._guard is not None and (status := self._guard.poll()) is not None:
            raise LaunchError(f"{self.name} ended with status {status}; the end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of its log."""
        if not self.log.exists():
            return "(no log)"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole family at once, as SIGKILL, SIGSTOP and SIGCONT are meant in drills."""
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the whole family; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self._wait(_STOP_SECONDS)

    def begin_stop(self) -> None:
        """Ask it to end; `finish_stop` waits for that."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def finish_stop(self) -> None:
        """Wait for the end, and force it if it does not come."""
        if self._guard is None:
            return
        self.begin_stop()
        if not self._wait(_STOP_SECONDS):
            self.kill()
            self._guard.kill()
            self._guard.wait()

    def _wait(self, seconds: float) -> bool:
        assert self._guard is not None
        deadline = time.monotonic() + seconds
        while self._guard.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
