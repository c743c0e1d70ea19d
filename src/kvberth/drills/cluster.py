"""The cluster that drills break: two prefill workers, two decode workers and the router, and what lies between them.

Where the kernel allows it, each process has a network namespace of its own, and packets between them go over the wire.
A proxy stands before each prefill worker's control channel, and each process has a wall clock of its own. Methods
block, and are called by one thread at a time.
"""

import contextlib
import json
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil
from rich.console import Console

from kvberth.drills.health import ROUTER, HealthSample
from kvberth.drills.helper import Helper
from kvberth.drills.namespaces import Namespaces, why_no_namespaces
from kvberth.drills.states import STATE_METRICS, EngineState, MemoryPressure, ProcessState, engine_state
from kvberth.drills.wire import Rule
from kvberth.drills.zmtp import Meddling
from kvberth.emulator.clock import CLOCK_FILE, ClockFile
from kvberth.emulator.faults import FaultFile
from kvberth.launch import ClusterSettings, EngineProcess, LaunchError, LocalCluster, ManagedProcess, Place, PortLease
from kvberth.launch.metrics import EngineMetrics

__all__ = ["DECODE", "ENGINES", "LEASE_SECONDS", "MODEL", "PREFILL", "ROUTER", "DrillCluster"]

MODEL = "small"
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
ENGINES = PREFILL + DECODE

_ADDRESSED = (PREFILL[0], *DECODE, *PREFILL[1:], ROUTER)
"""In the order of their addresses. Which of two engines makes the connection that KV moves over is decided by these."""

LEASE_SECONDS = 20.0
"""Longer than what is left after a drill may live, so that what is free has not merely expired."""
_CHUNK = 128
"""Tokens of one step: a prompt of 4,000 is prefilled in 32 steps, and a fault can come between any two."""
_PROXY_PORT = 7000
_START_SECONDS = 180.0
_END_SECONDS = 30.0
_HEALTH_SECONDS = 5.0
_PRESSURE = ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_preemptions_total")
_NUM_BLOCKS = 65536 // 16
"""Of the profile `small`."""


class DrillCluster:
    """A context manager; entering takes about a minute.

    Args:
        run_dir: for logs; made if it is not there.
        seed: of the wire's and the proxies' chances.
        console: where progress is shown.

    Raises:
        LaunchError: on entry, if a process does not start.
    """

    def __init__(self, run_dir: Path, seed: int, console: Console | None = None) -> None:
        self.run_dir = run_dir
        self.why_no_network = why_no_namespaces()
        self._seed = seed
        self._console = console
        self._stack = ExitStack()
        self._network: Namespaces | None = None
        self._proxies: dict[str, Helper] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            # An engine's faults are its own, so that a drill may hit one and spare the other.
            self._faults = {name: FaultFile.create(self._faults_path(name)) for name in ENGINES}
            self._clocks = {name: ClockFile.create(self._clock_path(name)) for name in (*ENGINES, ROUTER)}
            if self.why_no_network is None:
                self._network = stack.enter_context(Namespaces(_ADDRESSED, self._seed))
            ports = stack.enter_context(PortLease())
            self._advertised = {name: self._proxy_address(name, ports) for name in PREFILL}
            places = {name: self._place(name) for name in (*ENGINES, ROUTER)}
            self._cluster = stack.enter_context(LocalCluster(self._settings(), self._console, places))
            self._processes: dict[str, ManagedProcess] = {each.name: each for each in self._cluster.engines}
            assert self._cluster.router is not None
            self._processes[ROUTER] = self._cluster.router
            for index, (name, (host, port)) in enumerate(self._advertised.items()):
                proxy = self._make_proxy(name, host, port, self._seed + index)
                stack.callback(proxy.close)
                self._proxies[name] = proxy
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """Of the router."""
        return self._cluster.router_url

    @property
    def router_address(self) -> tuple[str, int]:
        """The same as host and port."""
        parts = urllib.parse.urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def engine_url(self, name: str) -> str:
        """Of one engine."""
        return self._processes[name].url

    def control_address(self, name: str) -> tuple[str, int]:
        """Where a prefill worker's control channel is dialled."""
        return self._advertised[name]

    # What can be done to it.

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process and its family."""
        self._processes[name].signal(number)

    def terminate(self, name: str) -> None:
        """SIGTERM to the process itself, which ends its family."""
        psutil.Process(self._processes[name].pid).send_signal(signal.SIGTERM)

    def await_end(self, name: str) -> None:
        """Until it has ended.

        Raises:
            LaunchError: it has not, in time.
        """
        deadline = time.monotonic() + _END_SECONDS
        while self._processes[name].is_alive:
            if time.monotonic() > deadline:
                raise LaunchError(f"{name} has not ended within {_END_SECONDS:g} s")
            time.sleep(0.05)

    def start(self, name: str) -> None:
        """Start one that has ended, at the same address; returns at once. One that lives is left alone."""
        if not self._processes[name].is_alive:
            self._processes[name].start()

    def await_ready(self, name: str) -> None:
        """Until it answers.

        Raises:
            LaunchError: it has ended, or does not answer in time.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self._processes[name].is_ready():
            if time.monotonic() > deadline:
                raise LaunchError(f"{name} is not ready after {_START_SECONDS:g} s")
            time.sleep(0.1)

    def set_rules(self, *rules: Rule) -> int:
        """The network's faults from now on; none are none. Returns how many packets they have hit until now."""
        assert self._network is not None, "drills that need the network are skipped without it"
        return self._network.set_rules(rules)

    def meddle(self, meddling: Meddling) -> int:
        """What happens to all control messages from now on.

        Returns how many messages and connections have been hit until now.
        """
        return sum(sum(proxy.tell(meddling).values()) for proxy in self._proxies.values())

    def set_clock(self, name: str, offset_seconds: float) -> None:
        """By how much a process's wall clock is ahead from now on."""
        self._clocks[name].offset_seconds = offset_seconds

    def limit_files(self, num_bytes: int | None) -> None:
        """How long files may be that processes write to from now on; None is as long as they like.

        At 0 nothing can be written, as on a full disk. Sockets and memory are not touched by it.
        """
        for process in self._processes.values():
            for each in process.family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    _, hard = each.rlimit(psutil.RLIMIT_FSIZE)
                    each.rlimit(psutil.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    def fail_transfers(self, name: str, **shares: float) -> None:
        """An engine's faults of NIXL from now on; see `kvberth.emulator.faults`."""
        self._faults[name].set(**shares)

    # What can be seen of it.

    def failed_transfers(self, name: str) -> int:
        """How many transfers of an engine these faults have hit until now."""
        return self._faults[name].hits()

    def family(self, name: str) -> list[psutil.Process]:
        """A process and its descendants; empty if it has ended."""
        return self._processes[name].family

    def log_bytes(self) -> dict[str, int]:
        """How long each process's log is."""
        return {name: each.log.stat().st_size for name, each in self._processes.items()}

    def clock_error(self, name: str) -> float:
        """By how many seconds the wall clock is ahead after which a process dates its answers."""
        with urllib.request.urlopen(f"{self._processes[name].url}/health", timeout=_HEALTH_SECONDS) as answer:  # noqa: S310
            return parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time()

    def router_metric(self, name: str, **labels: str) -> float:
        """The sum of a metric of the router over the series that have these labels."""
        return EngineMetrics(self.url).value(name, **labels)

    def pressure(self, name: str) -> MemoryPressure:
        """How full an engine's KV cache is, and what that has led to."""
        page = EngineMetrics(self.engine_url(name)).page(*_PRESSURE)
        return MemoryPressure(*(page.value(each) for each in _PRESSURE))

    def engine_states(self) -> dict[str, EngineState]:
        """By engine. One that does not answer holds, for all that is known, everything."""
        states = {}
        for name in ENGINES:
            try:
                page = EngineMetrics(self.engine_url(name)).page(*STATE_METRICS)
            except OSError:
                states[name] = EngineState(_NUM_BLOCKS, 0, 0, 0, 0)
            else:
                states[name] = engine_state(page, _NUM_BLOCKS)
        return states

    def process_states(self) -> dict[str, ProcessState]:
        """By process, of those that live."""
        states = {}
        for name, process in self._processes.items():
            family = process.family
            with contextlib.suppress(psutil.NoSuchProcess):
                states[name] = ProcessState(
                    family[0].pid,
                    sum(each.num_threads() for each in family),
                    sum(each.num_fds() for each in family),
                    sum(each.memory_info().rss for each in family),
                )
        return states

    def health(self, at: float) -> HealthSample:
        """What the router says now, which is `at` seconds from the start of the traffic."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=_HEALTH_SECONDS) as answer:  # noqa: S310 - our own URL
                said = answer.read()
        except urllib.error.HTTPError as error:  # 503 has a body like any other
            said = error.read()
        except OSError:
            return HealthSample(at, None)
        by_url: dict[str, dict[str, Any]] = {}
        for role in ("prefill", "decode", "unknown"):
            by_url.update({each["url"]: each for each in msgspec.json.decode(said)[role]})
        usable = {
            name: each["ready"] and each["breaker"] == "closed"
            for name in ENGINES
            if (each := by_url.get(self.engine_url(name))) is not None
        }
        return HealthSample(at, usable)

    def _settings(self) -> ClusterSettings:
        return ClusterSettings(
            model=MODEL,
            emulate=True,
            prefill=len(PREFILL),
            decode=len(DECODE),
            prefix_caching=False,
            engine_args=("--max-num-batched-tokens", str(_CHUNK)),
            prefill_args=("--shutdown-timeout", "10"),
            # Messages are to be dropped and doubled on their way, so that they must be readable there.
            authenticate=False,
            connector_config={"lease_seconds": LEASE_SECONDS, "allow_unauthenticated": True},
            run_dir=self.run_dir,
        )

    def _proxy_address(self, name: str, ports: PortLease) -> tuple[str, int]:
        """Where the proxy before a prefill worker listens."""
        if self._network is None:
            return "127.0.0.1", ports.take()
        return self._network.address(name), _PROXY_PORT

    def _place(self, name: str) -> Place:
        config: dict[str, Any] = {}
        if name in self._advertised:
            host, port = self._advertised[name]
            config = {"control_host": "127.0.0.1", "control_advertised": f"{host}:{port}"}
        faults = {"kvberth_emulator": {"faults": str(self._faults_path(name))}}
        env = {CLOCK_FILE: str(self._clock_path(name))}
        prefix: tuple[str, ...] = ()
        if self._network is not None:
            prefix = self._network.prefix(name)
            # Shared memory would reach over the borders of namespaces, and no fault of the network would be felt.
            env |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": self._network.device(name)}
            env["VLLM_HOST_IP"] = self._network.address(name)
        if name == ROUTER:
            prefix = (*prefix, sys.executable, "-m", "kvberth.emulator.clock", str(self._clock_path(name)))
        return Place(
            host=self._network.address(name) if self._network is not None else None,
            prefix=prefix,
            env=env,
            connector_config=config,
            engine_args=("--additional-config", json.dumps(faults)),
        )

    def _faults_path(self, name: str) -> Path:
        return self.run_dir / f"{name}.faults"

    def _clock_path(self, name: str) -> Path:
        return self.run_dir / f"{name}.clock"

    def _make_proxy(self, name: str, host: str, port: int, seed: int) -> Helper:
        engine = self._processes[name]
        assert isinstance(engine, EngineProcess)
        prefix = self._network.prefix(name) if self._network is not None else ()
        return Helper("proxy_process", [str(seed), f"{host}:{port}", f"127.0.0.1:{engine.control_port}"], prefix)
