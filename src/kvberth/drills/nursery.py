"""Engines that start in seconds: each has a nursery that has imported everything, and is forked from it."""

import os
import subprocess
from collections.abc import Sequence
from typing import IO

import msgspec

from kvberth.launch import EngineProcess
from kvberth.launch.process import Guard

__all__ = ["NursedEngine"]


class NursedEngine(EngineProcess):
    """An engine of the cluster as others are, but for how it is started. Emulated ones only."""

    def _new_guard(self, log: IO[bytes]) -> Guard:
        at = self._command.index("-m")
        nursery = self._guard
        if not isinstance(nursery, _Nursery):
            nursery = _Nursery([*self._command[:at], "-m", "kvberth.drills.nursery_process"], self._env, log)
        nursery.begin(self._command[at + 2 :])
        return nursery


class _Nursery:
    """The nursery as its engine's guard: what `subprocess.Popen` has of these names, of the engine's present life."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: IO[bytes]) -> None:
        # vLLM would start the engine's own process anew, for the sake of GPUs, and import everything again.
        env = {**env, "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin = self._process.stdin
        self.pid = self._process.pid
        self._said = self._process.stdout
        os.set_blocking(self._said.fileno(), False)
        self._status: int | None = None

    def begin(self, arguments: Sequence[str]) -> None:
        """Have an engine forked, as soon as all is imported; returns at once."""
        self._status = None
        self.stdin.write(msgspec.json.encode(arguments) + b"\n")
        self.stdin.flush()

    def poll(self) -> int | None:
        if self.stdin.closed or self._process.poll() is not None:
            return self._end_of_nursery()
        if self._status is None and (said := self._said.readline()):
            self._status = int(said)
        return self._status

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        status = self._process.wait()
        self._said.close()
        return status

    def _end_of_nursery(self) -> int | None:
        status = self._process.poll()
        if status is not None:
            self._said.close()
        return status
