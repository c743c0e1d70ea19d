"""A helper process of a drill: it is told what to do by lines of JSON, and confirms each with its counts so far."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["Helper", "HelperError"]

_STOP_SECONDS = 5.0


class HelperError(RuntimeError):
    """The helper has not started, or has ended; the text has what it said last."""


class Helper:
    """Starts a module of this package. Owned by one thread.

    Args:
        module: such as `wire_process`.
        arguments: for it.
        prefix: what stands before the command, such as `ip netns exec ...`.
    """

    def __init__(self, module: str, arguments: Sequence[str], prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", f"kvberth.drills.{module}", *arguments]
        self._name = module
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise self._ended()

    def tell(self, what: Any) -> dict[str, int]:
        """Send one line; returns when the helper has acted on it, with its counts since its start.

        Raises:
            HelperError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(what) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        assert self._process.stdout is not None
        try:
            return msgspec.json.decode(self._process.stdout.readline(), type=dict[str, int])
        except msgspec.MsgspecError as error:
            raise self._ended() from error

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> HelperError:
        _, said = self._process.communicate()
        lines = said.decode(errors="replace").splitlines() or ["(nothing)"]
        return HelperError(f"{self._name} has ended; it said last: {lines[-1]}")
