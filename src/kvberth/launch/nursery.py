"""Emulated engines that start in seconds: forked from a nursery, a process that has imported all that they need.

    launcher --socket--> nursery --fork--> guard --fork--> vLLM's API server --fork--> EngineCore
           `-------------------pipes------'

Imports are nearly all of what an emulated engine's start costs, and vLLM makes them twice for each engine. An engine on
a GPU is not forked: what CUDA has begun in one process does not work in its child.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

__all__ = ["ForkOrder", "Nurseries"]


class ForkOrder(msgspec.Struct):
    """What the nursery is told, together with three descriptors: the guard's input and output, and the log.

    Attributes:
        arguments: of vLLM's API server.
        env: the engine's whole environment.
    """

    arguments: list[str]
    env: dict[str, str]


class Nurseries:
    """One nursery per prefix, made when it is first needed and kept until `close`. Owned by one thread.

    An engine is the launcher's, not its nursery's: it lives on when the nursery ends.
    """

    def __init__(self) -> None:
        self._nurseries: dict[tuple[str, ...], _Nursery] = {}

    def fork(
        self, prefix: Sequence[str], arguments: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> "ForkedGuard":
        """Have an engine forked, as soon as all is imported; returns at once.

        What libraries make of the environment while they are imported is that of the first engine with this prefix.

        Args:
            prefix: what stands before the engine's command, such as `ip netns exec ...`.
            arguments: of vLLM's API server.
            env: the engine's whole environment.
            log: for the output of the engine and, if this is its first engine, of the nursery.
        """
        # vLLM would start the engine's own process anew, for the sake of GPUs, and import everything again.
        env = {**env, "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        order = ForkOrder(list(arguments), env)
        key = tuple(prefix)
        if (nursery := self._nurseries.get(key)) is not None:
            try:
                return nursery.fork(order, log)
            except ConnectionError:  # it has died
                nursery.close()
        nursery = self._nurseries[key] = _Nursery(prefix, env, log)
        return nursery.fork(order, log)

    def close(self) -> None:
        """End all that there are; one that is needed later is made anew."""
        for nursery in self._nurseries.values():
            nursery.close()
        self._nurseries.clear()


class _Nursery:
    """The process, and our end of its socket."""

    def __init__(self, prefix: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvberth.launch.nursery_process"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def fork(self, order: ForkOrder, log: IO[bytes]) -> "ForkedGuard":
        """Raises `ConnectionError` if the nursery has died."""
        heard, stdin = os.pipe()
        said, says = os.pipe()
        try:
            socket.send_fds(self._socket, [msgspec.json.encode(order)], [heard, says, log.fileno()])
        except ConnectionError:
            os.close(stdin)
            os.close(said)
            raise
        finally:
            os.close(heard)
            os.close(says)
        return ForkedGuard(stdin, said)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ForkedGuard:
    """An engine's guard (`kvberth.launch.guard`) that is no child of ours: what it says comes through a pipe."""

    def __init__(self, stdin: int, said: int) -> None:
        self.stdin = open(stdin, "wb", buffering=0)  # noqa: SIM115 - closed by whoever ends the engine
        self._said = open(said, "rb", buffering=0)  # noqa: SIM115 - closed at the end of the guard
        self._poll = select.poll()
        self._poll.register(self._said, select.POLLIN)
        self._lines: list[int] = []  # the guard's pid, and then the engine's status
        self._has_ended = False

    @property
    def pid(self) -> int:
        """Of the guard; waits until it has been forked. 0 if it never was."""
        while not self._lines and not self._has_ended:
            self._listen(block=True)
        return self._lines[0] if self._lines else 0

    def poll(self) -> int | None:
        """The engine's status once its family has ended, None before."""
        while not self._has_ended and self._listen(block=False):
            pass
        if not self._has_ended:
            return None
        return self._lines[1] if len(self._lines) == 2 else -signal.SIGKILL

    def kill(self) -> None:
        """The guard alone."""
        if self.pid and not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Until the guard has ended."""
        while not self._has_ended:
            self._listen(block=True)
        status = self.poll()
        assert status is not None
        return status

    def _listen(self, block: bool) -> bool:
        """Read a line, or that there will be none; False if nothing has been said yet."""
        if not self._poll.poll(None if block else 0):
            return False
        if line := self._said.readline():  # the guard writes each in one go
            self._lines.append(int(line))
        else:
            self._has_ended = True
            self._said.close()
        return True
