"""A whole cluster as one object: what is started here is stopped here."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvberth.keys import KeyFileError, PeerRole, make_key_pair, write_key_pair
from kvberth.launch.engine import ROLES, EngineKind, EngineProcess, Hardware
from kvberth.launch.nursery import Nurseries
from kvberth.launch.place import Place
from kvberth.launch.ports import PortLease, is_free
from kvberth.launch.process import LaunchError, ManagedProcess
from kvberth.launch.settings import ClusterSettings, Connector

__all__ = ["LocalCluster"]

_START_SECONDS = 600.0
_CONTROL_PORTS = 8
"""Ports in a row for one prefill worker's control channel: one per tensor-parallel rank."""


class LocalCluster:
    """Prefill workers, decode workers, undivided engines and the router, as a context manager.

    The processes end with the block, with Ctrl-C, and with this process, however it dies.

    Args:
        settings: what to start.
        console: where progress is shown; None shows nothing.
        places: where processes run that do not simply run on this machine, by their names, such as `prefill-0`.
        nurseries: where emulated engines are forked, for one who starts clusters again and again; else our own.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        console: Console | None = None,
        places: Mapping[str, Place] | None = None,
        nurseries: Nurseries | None = None,
    ) -> None:
        self.settings = settings
        self._places = places or {}
        self.nurseries = nurseries or Nurseries()
        self._owns_nurseries = nurseries is None
        self._console = console or Console(quiet=True)
        self._ports = PortLease(settings.host)
        self.run_dir = settings.run_dir or Path(tempfile.gettempdir()) / f"kvberth-{os.getpid()}-{time.time_ns()}"
        self._keys_dir: Path | None = None
        self.engines: list[EngineProcess] = []
        self.router: ManagedProcess | None = None

    @property
    def prefill(self) -> list[EngineProcess]:
        """The prefill workers."""
        return self._of_kind(EngineKind.PREFILL)

    @property
    def decode(self) -> list[EngineProcess]:
        """The decode workers."""
        return self._of_kind(EngineKind.DECODE)

    @property
    def undivided(self) -> list[EngineProcess]:
        """The engines without a connector."""
        return self._of_kind(EngineKind.UNDIVIDED)

    @property
    def router_url(self) -> str:
        """Where clients go.

        Raises:
            LaunchError: there is no router, since there are no decode workers or it has not been started.
        """
        if self.router is None:
            raise LaunchError("this cluster has no router")
        return self.router.url

    def __enter__(self) -> Self:
        """Start everything and wait until it is ready.

        Raises:
            LaunchError: a process has ended or is not ready in time. Everything has been stopped.
        """
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop everything."""
        self._stop()

    def key_file(self, name: str, role: PeerRole = PeerRole.ENGINE) -> Path | None:
        """A key of its own for one more engine or router, whom all others accept; None in a cluster without keys.

        Raises:
            LaunchError: it cannot be made.
        """
        if not self.settings.authenticate or self.settings.connector is not Connector.KVBERTH:
            return None
        try:
            if self._keys_dir is None:
                self._keys_dir = Path(tempfile.mkdtemp(prefix="kvberth-keys-"))  # for us only
            return write_key_pair(make_key_pair(name, role), self._keys_dir)[1]
        except (KeyFileError, OSError) as error:
            raise LaunchError(str(error)) from error

    def wait(self) -> None:
        """Block while everything lives.

        Raises:
            LaunchError: a process has died.
        """
        while True:
            self.check()
            time.sleep(0.5)

    def check(self) -> None:
        """Do nothing while everything lives.

        Raises:
            LaunchError: a process has died.
        """
        for process in self._processes():
            process.check()

    def _of_kind(self, kind: EngineKind) -> list[EngineProcess]:
        return [engine for engine in self.engines if engine.kind is kind]

    def _processes(self) -> Sequence[ManagedProcess]:
        return [*self.engines, *([self.router] if self.router else [])]

    def _start(self) -> None:
        if self.settings.port is not None and not is_free(self.settings.host, self.settings.port):
            # The router starts last: it would say so too, but after the engines' minute.
            raise LaunchError(f"the router's port {self.settings.port} on {self.settings.host} is not free")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        settings, hardware = self.settings, Hardware.detect()
        kinds = [
            *((EngineKind.PREFILL, index) for index in range(settings.prefill)),
            *((EngineKind.DECODE, index) for index in range(settings.decode)),
            *((EngineKind.UNDIVIDED, index) for index in range(settings.undivided)),
        ]
        # All of them before the first engine looks whom to accept.
        key_files = {(kind, index): self.key_file(f"{kind}-{index}") for kind, index in kinds if kind in ROLES}
        router_key = self.key_file("router", PeerRole.ROUTER) if settings.decode else None
        for position, (kind, index) in enumerate(kinds):
            place = self._place(f"{kind}-{index}")
            engine = EngineProcess(
                kind,
                index,
                settings,
                hardware,
                num_engines=len(kinds),
                position=position,
                port=place.port or self._ports.take(),
                control_port=self._ports.take(_CONTROL_PORTS) if self._has_control_channel(kind) else 0,
                run_dir=self.run_dir,
                nurseries=self.nurseries,
                key_file=key_files.get((kind, index)),
                place=place,
            )
            self.engines.append(engine)
            engine.start()
        self._await(self.engines)
        if self.decode:
            self.router = self._make_router(router_key)
            self.router.start()
            self._await([self.router])

    def _has_control_channel(self, kind: EngineKind) -> bool:
        """Only prefill workers listen; with vLLM's connectors, decode workers do too."""
        is_vllm_decode = kind is EngineKind.DECODE and self.settings.connector is Connector.VLLM
        return kind is EngineKind.PREFILL or is_vllm_decode

    def _place(self, name: str) -> Place:
        return self._places.get(name, Place())

    def _make_router(self, key_file: Path | None) -> ManagedProcess:
        settings, place = self.settings, self._place("router")
        host = place.host or settings.host
        port = settings.port or place.port or self._ports.take()
        command = [*place.prefix, sys.executable, "-m", "kvberth", "router", "--host", host, "--port", str(port)]
        command += ["--mode", settings.mode]
        if key_file is not None:
            command += ["--control-key-file", str(key_file), "--control-peers-dir", str(key_file.parent)]
        for engine in self.prefill:
            command += ["--prefill", engine.url]
        for engine in self.decode:
            command += ["--decode", engine.url]
        command += settings.router_args
        env = {**os.environ, **place.env}
        return ManagedProcess("router", command, env, self.run_dir / "router.log", f"http://{host}:{port}")

    def _await(self, processes: Sequence[ManagedProcess]) -> None:
        """Until all are ready, with a line for each."""
        deadline = time.monotonic() + _START_SECONDS
        columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            tasks = {process.name: progress.add_task(process.name, total=1) for process in processes}
            pending = list(processes)
            while pending:
                for process in list(pending):
                    if process.is_ready():
                        progress.update(tasks[process.name], completed=1, description=f"{process.name} {process.url}")
                        pending.remove(process)
                if pending and time.monotonic() > deadline:
                    slow = pending[0]
                    raise LaunchError(
                        f"{slow.name} is not ready after {_START_SECONDS:g} s; the end of {slow.log}:\n{slow.tail()}"
                    )
                time.sleep(0.2)

    def _stop(self) -> None:
        """The router first, then all engines at once."""
        for process in [*([self.router] if self.router else []), *self.engines]:
            with contextlib.suppress(OSError):
                process.begin_stop()
        for process in self._processes():
            process.finish_stop()
        if self._owns_nurseries:
            self.nurseries.close()
        self._ports.close()
        if self._keys_dir is not None:
            shutil.rmtree(self._keys_dir, ignore_errors=True)
            self._keys_dir = None
