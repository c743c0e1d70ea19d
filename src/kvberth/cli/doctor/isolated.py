"""Python code in a process of its own: a library that crashes or hangs when it is loaded is a finding, not our end."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Outcome", "RunCode", "run_isolated"]

_TIMEOUT_SECONDS = 180.0
"""vLLM's import alone takes half a minute on a small machine that is busy."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the code ended; `problem` is one line, empty when `worked`."""

    worked: bool
    problem: str = ""


RunCode = Callable[[str], Outcome]


def run_isolated(code: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> Outcome:
    """Run `code` with this Python and wait for its end."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, f"no end after {timeout_seconds:g} s")
    if done.returncode == 0:
        return Outcome(True)
    if done.returncode < 0:
        return Outcome(False, f"killed by {signal.Signals(-done.returncode).name}")
    lines = done.stderr.strip().splitlines()
    return Outcome(False, lines[-1].strip() if lines else f"exit status {done.returncode}")
