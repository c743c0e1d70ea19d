"""What a mover's thread costs the engine whose process it is in: processes with real movers, and a loop of steps.

Three processes: the *engine*, whose main thread runs steps as an engine does, and who has a mover; the *peer* at the
other end of all transfers; and the *carrier*, which has a mover and no steps.

A step takes longer for three reasons, and the kernel keeps them apart: its thread waits for a core, it runs slower
(caches and memory are shared), or it is blocked for longer. It is blocked while it waits for the device, always for
the same time, and while it waits for the interpreter lock. Compared are windows with the engine's own mover and,
beside each, one in which the carrier's does the same: all but the lock is equal. (An idle machine is no measure of
that: a busy one wakes up sooner.)
"""

import gc
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from benchmarks.mover_memory import Layout, Memory
from benchmarks.mover_posting import Blocks

from kvberth.layout import Fingerprint
from kvberth.mover import AdvancePrefill, AnnouncePrefill, AwaitRequest, Command, FinishPrefill, Mover
from kvberth.protocol import EngineCard, Timing, TransferKey, TransferMode
from kvberth.protocol.events import PrefillAdvanced, PrefillAnnounced, PrefillFinished, RequestWaiting
from kvberth.protocol.ids import RequestId, Role
from kvberth.transport.nixl import MemoryType, NixlTransport

__all__ = ["Load", "Setup", "Window", "WindowResult", "free_ports", "idle_cpu_share", "serve_engine", "serve_rank"]

_BLOCK_SIZE = 16
_CHUNK_SECONDS = 0.06
"""Between the two chunks of a 16k prompt: about as long as a large accelerator reads one."""
_DRAIN_SECONDS = 10.0
_WAIT_SECONDS = 0.004
"""Of a step, during which the host waits for the device with the lock released."""
_HOST_SECONDS = 0.001
"""Of a step, during which the host works in Python."""


class Load(StrEnum):
    """What the mover under test does."""

    NONE = "none"
    PUSHES = "P pushes"
    RECEIVES = "D is pushed to"
    PULLS = "D pulls"

    @property
    def role(self) -> Role:
        return Role.PRODUCER if self is Load.PUSHES else Role.CONSUMER

    @property
    def mode(self) -> TransferMode:
        return TransferMode.PULL if self is Load.PULLS else TransferMode.PUSH


@dataclass(frozen=True)
class Window:
    """Some seconds of load, the same for both ends.

    Attributes:
        number: makes the transfers' ids unique.
        starts: on the monotonic clock, which processes of one machine share.
        transfers_per_second: evenly spaced.
    """

    number: int
    load: Load
    layout: Layout
    starts: float
    seconds: float
    transfers_per_second: float

    def transfers(self) -> Iterator[tuple[float, int, TransferKey]]:
        """(when, number, key) of each."""
        if self.load is not Load.NONE:
            for number in range(int(self.seconds * self.transfers_per_second)):
                yield self.starts + number / self.transfers_per_second, number, TransferKey(f"{self.number}-{number}")


@dataclass(frozen=True)
class Setup:
    """What all processes agree on.

    Attributes:
        ports: of the control channel, by process and layout.
        pairs: (P's blocks, D's blocks) of the transfers, used in turn.
    """

    num_layers: int
    num_blocks: int
    page_bytes: int
    ports: dict[tuple[str, Layout], int]
    pairs: tuple[Blocks, ...]


@dataclass(frozen=True)
class WindowResult:
    """What one process saw.

    Attributes:
        step_seconds: how long each step took; empty without a loop of steps.
        ran_seconds: in which the thread of the steps was on a core.
        core_wait_seconds: in which it could have been, and waited for one.
        mover_cpu_seconds: of the mover's thread.
        took: seconds of the whole window, until all transfers had ended.
        ended: transfers that did.
    """

    step_seconds: list[float] = field(default_factory=list)
    ran_seconds: float = 0.0
    core_wait_seconds: float = 0.0
    mover_cpu_seconds: float = 0.0
    took: float = 0.0
    ended: int = 0


def free_ports(count: int) -> list[int]:
    """That nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class _Rank:
    """A mover with memory of one layout, as one rank of an engine has it."""

    def __init__(self, name: str, layout: Layout, setup: Setup) -> None:
        memory = Memory.make(layout, setup.num_layers, setup.num_blocks, setup.page_bytes, seed=1)
        regions, incarnation = memory.regions, uuid.uuid4().hex
        self._memory, self._setup, self._layout = memory, setup, layout
        fingerprint = Fingerprint(
            model="benchmark",
            dtype="bfloat16",
            kv_cache_dtype="auto",
            num_layers=setup.num_layers,
            num_kv_heads=8,
            head_size=128,
            block_size=_BLOCK_SIZE,
            layout=layout,
            tensor_parallel_size=1,
            block_lengths=tuple(region.block_length for region in regions),
        )

        def make_transport() -> NixlTransport:
            transport = NixlTransport(f"{name}/{layout}/{incarnation}", MemoryType.HOST)
            transport.register(regions, setup.num_blocks)
            return transport

        def make_card(agent_metadata: bytes) -> EngineCard:
            return EngineCard(
                engine_id=f"{name}/{layout}",
                incarnation=incarnation,
                rank=0,
                fingerprint=fingerprint,
                regions=regions,
                num_blocks=setup.num_blocks,
                agent_metadata=agent_metadata,
            )

        self.mover = Mover(make_transport, make_card, ("127.0.0.1", setup.ports[name, layout]), Timing())
        others = set(threading.enumerate())
        self.mover.start()
        (self._thread,) = {each for each in threading.enumerate() if each.name == "kvberth-mover"} - others

    def cpu_seconds(self) -> float:
        """Of the mover's thread, so far."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def commands(self, window: Window, role: Role, producer: str) -> deque[tuple[float, Command]]:
        """(when, what) of one end of all transfers of a window.

        Args:
            producer: the process that has the KV.
        """
        schedule: list[tuple[float, Command]] = []
        for when, number, key in window.transfers():
            prefill_blocks, decode_blocks = (tuple(each) for each in self._setup.pairs[number % len(self._setup.pairs)])
            request, tokens = RequestId(str(key)), len(prefill_blocks) * _BLOCK_SIZE
            if role is Role.CONSUMER:
                event = RequestWaiting(request, 0, window.load.mode, 0, tokens, b"digest", decode_blocks)
                port = self._setup.ports[producer, self._layout]
                schedule.append((when, AwaitRequest(key, "127.0.0.1", port, event)))
                continue
            half, ends = len(prefill_blocks) // 2, when + _CHUNK_SECONDS
            schedule += [
                (when, AnnouncePrefill((key,), PrefillAnnounced(request, tokens, b"digest"))),
                (when, AdvancePrefill((key,), PrefillAdvanced(0, prefill_blocks[:half], False))),
                (ends, AdvancePrefill((key,), PrefillAdvanced(half, prefill_blocks[half:], True))),
                (ends, FinishPrefill((key,), PrefillFinished(prefill_blocks))),
            ]
        return deque(sorted(schedule, key=lambda each: each[0]))

    def take(self) -> int:
        """How many transfers have ended since the last call. Raises if one failed."""
        results = self.mover.take()
        for report in results.reports:
            if report.record.reason != "none":
                raise RuntimeError(f"transfer {report.record.key}: {report.record.reason} {report.record.detail}")
        return len(results.reports)


def _other(role: Role) -> Role:
    return Role.PRODUCER if role is Role.CONSUMER else Role.CONSUMER


class _Process:
    """One process's ranks, one per layout, and the end of the transfers that is its own."""

    def __init__(self, name: str, setup: Setup) -> None:
        self._name = name
        self._ranks = {layout: _Rank(name, layout, setup) for layout in Layout}

    def run(self, window: Window, tested: str, step: Callable[[], None] | None) -> WindowResult:
        """Its part of a window.

        Args:
            tested: the process whose mover is under test; the peer has the other role.
            step: one step of the engine; None for a process without.
        """
        takes_part = self._name in {tested, "peer"}
        role = window.load.role if self._name == tested else _other(window.load.role)
        rank = self._ranks[window.layout]
        producer = tested if window.load.role is Role.PRODUCER else "peer"
        commands = rank.commands(window, role, producer) if takes_part else deque()
        wanted = sum(1 for _ in window.transfers()) if takes_part else 0
        steps: list[float] = []
        ended = 0
        ends = window.starts + window.seconds
        time.sleep(max(0.0, window.starts - time.monotonic()))
        cpu, (ran, core_wait), now = rank.cpu_seconds(), _scheduled(), time.monotonic()
        while now < ends or ended < wanted:
            if now > ends + _DRAIN_SECONDS:
                raise RuntimeError(f"{self._name}: {wanted - ended} of {wanted} transfers have not ended: {window}")
            began = time.perf_counter()
            rank.mover.begin_step()
            ended += rank.take()
            while commands and commands[0][0] <= now:
                rank.mover.submit(commands.popleft()[1])
            if step is not None:
                step()
                steps.append(time.perf_counter() - began)
            else:
                time.sleep(0.002)
            rank.mover.end_step()
            now = time.monotonic()
        ran, core_wait = (after - before for after, before in zip(_scheduled(), (ran, core_wait), strict=True))
        return WindowResult(steps, ran, core_wait, rank.cpu_seconds() - cpu, now - window.starts, ended)

    def stop(self) -> None:
        for rank in self._ranks.values():
            rank.mover.stop()


def _scheduled() -> tuple[float, float]:
    """Seconds that this thread has been on a core, and has waited for one, by the kernel's own account."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


class _Steps:
    """Steps of an engine: a millisecond of Python and small numpy, then a wait."""

    def __init__(self) -> None:
        self._rounds = 1
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        times = []
        for _ in range(300):
            began = time.perf_counter()
            self._work()
            times.append(time.perf_counter() - began)
        self._rounds = max(1, round(_HOST_SECONDS / sorted(times)[len(times) // 2]))

    def _work(self) -> None:
        """As a scheduler and a model runner do: dicts and lists of blocks, small arrays, and many short calls that give
        up the lock, as each launch on a device and each send does."""
        for _ in range(self._rounds):
            os.write(self._nowhere, b"x")
            requests = {f"request-{number}": list(range(number, number + 8)) for number in range(8)}
            lengths = np.array([len(blocks) for blocks in requests.values()])
            starts = np.concatenate(([0], np.cumsum(lengths)))
            sum(int(start) + requests[name][0] for name, start in zip(requests, starts[:-1], strict=True))

    def __call__(self) -> None:
        """One step."""
        self._work()
        time.sleep(_WAIT_SECONDS)


def serve_engine(pipe: Connection, setup: Setup) -> None:
    """The engine's process: a loop of steps and a mover."""
    _serve(pipe, _Process("engine", setup), _Steps())


def serve_rank(pipe: Connection, name: str, setup: Setup) -> None:
    """A process with movers and without steps: the peer, or the carrier."""
    _serve(pipe, _Process(name, setup), None)


def _serve(pipe: Connection, process: _Process, step: _Steps | None) -> None:
    gc.freeze()  # as vLLM does
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        window, tested = asked
        pipe.send(process.run(window, tested, step))
    process.stop()


def idle_cpu_share(pipe: Connection, setup: Setup | None, seconds: float) -> None:
    """A process of its own with one mover, which does one transfer with the peer and then nothing.

    Sends seconds of CPU per second, of the whole process. Without a setup the process has no mover: the floor.
    """
    rank = None
    if setup is not None:
        rank = _Rank("idle", Layout.BLOCK_MAJOR, setup)
        pipe.send("ready")
        window = pipe.recv()
        ended, commands = 0, rank.commands(window, Role.CONSUMER, "peer")
        for _, command in commands:
            rank.mover.submit(command)
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not ended:
            if time.monotonic() > deadline:
                raise RuntimeError("the first transfer has not ended")
            time.sleep(0.002)
            ended += rank.take()
        time.sleep(1.0)
    cpu, began = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    pipe.send((time.process_time() - cpu) / (time.perf_counter() - began))
    if rank is not None:
        rank.mover.stop()
