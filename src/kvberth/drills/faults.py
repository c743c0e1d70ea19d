"""What a drill does to the cluster: each fault begins, ends, and says what it has touched.

Methods block for as long as the deed itself takes.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import psutil

from kvberth.drills.cluster import DrillCluster
from kvberth.drills.wire import Rule
from kvberth.drills.zmtp import Meddling

__all__ = [
    "ClockJumps",
    "DiskFull",
    "Fault",
    "Flap",
    "Kill",
    "Meddle",
    "Nothing",
    "Pause",
    "Rules",
    "Terminate",
    "TransferErrors",
]


_LOOK_SECONDS = 0.3
_RULES_SECONDS = 1.0
"""How long the network is at fault before a process is stopped in it."""
_LOG_SECONDS = 3.0
"""Within which a process that can write again does."""
_CLOCK_SECONDS = 60.0
"""A server dates its answers by a clock that it reads once a second, if it comes to it."""


class Fault(Protocol):
    """Something that goes wrong for a while.

    Attributes:
        trace: what shows that it was felt, such as "packets"; empty for no fault.
        felt: how many of them it has touched, once it has ended; with 0 the drill has proved nothing.
    """

    trace: ClassVar[str]
    felt: int

    def begin(self, cluster: DrillCluster) -> None: ...
    def end(self, cluster: DrillCluster) -> None:
        """Undo it; what was ended is started again, and may not be ready yet."""


@dataclass(slots=True)
class Nothing:
    """To compare with."""

    trace: ClassVar[str] = ""
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        pass

    def end(self, cluster: DrillCluster) -> None:
        pass


@dataclass(slots=True)
class Kill:
    """SIGKILL; then a new start at the same address."""

    names: tuple[str, ...]
    trace: ClassVar[str] = "processes gone"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        families = [cluster.family(name) for name in self.names]
        # All at once: to see one of them gone takes a while.
        for name in self.names:
            cluster.signal(name, signal.SIGKILL)
        for name in self.names:
            cluster.await_end(name)
        self.felt = _all(families, lambda each: not each.is_running())

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.start(name)


@dataclass(slots=True)
class Terminate:
    """SIGTERM, as from a supervisor that moves the worker elsewhere; then a new start at the same address."""

    names: tuple[str, ...]
    trace: ClassVar[str] = "processes gone"
    felt: int = 0
    _families: list[list[psutil.Process]] = field(default_factory=list)

    def begin(self, cluster: DrillCluster) -> None:
        self._families = [cluster.family(name) for name in self.names]
        for name in self.names:
            cluster.terminate(name)

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.await_end(name)
        self.felt = _all(self._families, lambda each: not each.is_running())
        for name in self.names:
            cluster.start(name)


@dataclass(slots=True)
class Pause:
    """SIGSTOP, then SIGCONT: a process that hangs and wakes up, and does not know that it has.

    Attributes:
        rules: of the network, from some time before until it wakes up.
    """

    names: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    trace: ClassVar[str] = "processes stopped"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        if self.rules:
            cluster.set_rules(*self.rules)
            time.sleep(_RULES_SECONDS)
        for name in self.names:
            cluster.signal(name, signal.SIGSTOP)

    def end(self, cluster: DrillCluster) -> None:
        families = [cluster.family(name) for name in self.names]
        self.felt = _all(families, lambda each: each.status() == psutil.STATUS_STOPPED)
        for name in self.names:
            cluster.signal(name, signal.SIGCONT)
        if self.rules:
            cluster.set_rules()


@dataclass(slots=True)
class Rules:
    """The network at fault."""

    rules: tuple[Rule, ...]
    trace: ClassVar[str] = "packets"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        self.felt = -cluster.set_rules(*self.rules)

    def end(self, cluster: DrillCluster) -> None:
        self.felt += cluster.set_rules()


@dataclass(slots=True)
class Flap:
    """The network at fault again and again: `on_seconds` with it, `off_seconds` without."""

    rules: tuple[Rule, ...]
    on_seconds: float
    off_seconds: float
    trace: ClassVar[str] = "packets"
    felt: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self, cluster: DrillCluster) -> None:
        self.felt = -cluster.set_rules()
        self._thread = threading.Thread(target=self._run, args=(cluster,), name="kvb-flap")
        self._thread.start()

    def end(self, cluster: DrillCluster) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self.felt += cluster.set_rules()

    def _run(self, cluster: DrillCluster) -> None:
        while not self._is_over.is_set():
            cluster.set_rules(*self.rules)
            self._is_over.wait(self.on_seconds)
            cluster.set_rules()
            self._is_over.wait(self.off_seconds)


@dataclass(slots=True)
class Meddle:
    """Control messages at fault, of all prefill workers."""

    meddling: Meddling
    trace: ClassVar[str] = "messages or connections"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        self.felt = -cluster.meddle(Meddling())
        cluster.meddle(self.meddling)

    def end(self, cluster: DrillCluster) -> None:
        self.felt += cluster.meddle(Meddling())


@dataclass(slots=True)
class TransferErrors:
    """NIXL at fault, in engines of these names; shares as in `kvberth.emulator.faults`."""

    names: tuple[str, ...]
    post: float = 0.0
    transfer: float = 0.0
    trace: ClassVar[str] = "transfers"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        self.felt = -self._count(cluster)
        for name in self.names:
            cluster.fail_transfers(name, post=self.post, transfer=self.transfer)

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.fail_transfers(name, post=0.0, transfer=0.0)
        self.felt += self._count(cluster)

    def _count(self, cluster: DrillCluster) -> int:
        return sum(cluster.failed_transfers(name) for name in self.names)


@dataclass(slots=True)
class DiskFull:
    """No process of the cluster can write another byte to any file.

    What they write all the time are their logs: one that stands still, and goes on afterwards, has been refused.
    """

    trace: ClassVar[str] = "logs that stood still"
    felt: int = 0
    _before: dict[str, int] = field(default_factory=dict)

    def begin(self, cluster: DrillCluster) -> None:
        cluster.limit_files(0)
        self._before = cluster.log_bytes()

    def end(self, cluster: DrillCluster) -> None:
        still = {name: size for name, size in cluster.log_bytes().items() if size == self._before.get(name)}
        cluster.limit_files(None)
        deadline = time.monotonic() + _LOG_SECONDS
        while not self.felt and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            now = cluster.log_bytes()
            self.felt = sum(now[name] > size for name, size in still.items())


@dataclass(slots=True)
class ClockJumps:
    """The wall clocks of these processes jump, each its own way, and back at the end."""

    offsets: dict[str, float]
    trace: ClassVar[str] = "processes with a wrong clock"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        for name, seconds in self.offsets.items():
            cluster.set_clock(name, seconds)

    def end(self, cluster: DrillCluster) -> None:
        for name, seconds in self.offsets.items():
            with contextlib.suppress(OSError):
                self.felt += abs(cluster.clock_error(name) - seconds) < _CLOCK_SECONDS
        for name in self.offsets:
            cluster.set_clock(name, 0.0)


def _all(families: Sequence[Sequence[psutil.Process]], is_hit: Callable[[psutil.Process], bool]) -> int:
    """How many processes these are, if all are hit; else 0."""
    processes = [each for family in families for each in family]
    return len(processes) if all(is_hit(each) for each in processes) else 0
