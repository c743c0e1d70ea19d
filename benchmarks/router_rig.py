"""The processes of the router's benchmark, and its windows: who is asked, in which order, and what that takes."""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import msgspec
import psutil
from benchmarks.mover_load import free_ports
from benchmarks.router_engines import Pace, serve_engines
from benchmarks.router_figures import DIRECT, most_open, window_figures
from benchmarks.router_load import Load, Mode, Target, serve_client

from kvberth.bench.machine import machine, versions

__all__ = ["OTHER", "OURS", "THEIRS", "Case", "Rig", "cases"]

OURS = "kvberth"
OTHER = "kvberth, other"
THEIRS = "vllm-router"

_SPAWN = multiprocessing.get_context("spawn")
_START_SECONDS = 60.0
_IDLE_SECONDS = 3.0
_WARM_UP_SECONDS = 2.0
_SAMPLE_SECONDS = 0.1
_HELD_TOKEN_SECONDS = 0.5
_HELD_BEGUN_PER_SECOND = 400


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    streams: int
    tokens: int
    pace: Pace


def cases(arguments: argparse.Namespace) -> list[Case]:
    """One per number of streams, and one with short answers: its mix tells a request's cost from a token's."""
    pace = Pace(arguments.prefill_ms / 1e3, arguments.token_ms / 1e3, arguments.in_steps)
    # A single stream takes its time to give as many requests as many do: shorter answers, the same steps.
    rows = [Case(f"{n}", n, arguments.tokens if n > 1 else 4, pace) for n in arguments.streams]
    return [*rows, Case("16, short answers", 16, 1, pace)]


class Rig:
    """All processes of one run, and what was measured."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.windows: list[dict[str, Any]] = []
        self.held: list[dict[str, Any]] = []
        self._arguments = arguments
        self._stack = contextlib.ExitStack()
        self._others = os.sched_getaffinity(0) - {arguments.router_cpu} or {arguments.router_cpu}
        self._routers: dict[str, psutil.Process] = {}
        self._ports: dict[str, tuple[int, ...]] = {}
        self._idle: dict[str, float] = {}

    def __enter__(self) -> "Rig":
        os.sched_setaffinity(0, self._others)  # what it looks up meanwhile is not the router's either
        with contextlib.ExitStack() as stack:
            self._engines = stack.enter_context(_child(serve_engines, self._others))
            self._client = stack.enter_context(_child(serve_client, self._others))
            self._ports[DIRECT] = tuple(self._engines.recv())
            self._client.recv()
            self._requests = stack.enter_context((self._arguments.out / "requests.jsonl").open("w"))
            self._windows = stack.enter_context((self._arguments.out / "windows.jsonl").open("w"))
            commands = {OURS: self._arguments.ours}
            commands |= {f"{OTHER} {number}": command for number, command in enumerate(self._arguments.other, 1)}
            for name, command in commands.items():
                self._start(stack, name, self._our_command(shlex.split(command)))
            if self._arguments.vllm_router:
                self._start(stack, THEIRS, self._their_command())
            for name in self._routers:
                self._idle[name] = self._idle_share(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """Fills `windows` and `held`."""
        arguments = self._arguments
        settings = {key: value for key, value in vars(arguments).items() if key != "out"}
        about = {"settings": settings, "machine": machine(), "versions": versions() | self._their_version()}
        (arguments.out / "run.json").write_text(json.dumps(about, default=str))
        targets = [
            Target(name, mode, ports)
            for mode in arguments.modes
            for name, ports in self._ports.items()
            if _can(name, mode, arguments.modes)
        ]
        source = random.Random(arguments.seed)  # noqa: S311 - no secret
        for case in cases(arguments)[-1:]:
            for target in targets:
                self._measure(target, case, 0, seconds=_WARM_UP_SECONDS)
        for repetition in range(1, arguments.repeat + 1):
            for case in cases(arguments):
                for target in source.sample(targets, len(targets)):
                    self._measure(target, case, repetition, seconds=arguments.seconds)
        for target in targets if arguments.hold else ():
            if not target.name.startswith(OTHER):
                self._hold(target)

    def _measure(self, target: Target, case: Case, repetition: int, seconds: float) -> None:
        self._engines.send(case.pace)
        load = Load(
            target=target,
            streams=case.streams,
            tokens=case.tokens,
            prompt_bytes=self._arguments.prompt_bytes,
            seconds=seconds,
            ramp_seconds=min(self._arguments.ramp, seconds / 2),
            seed=self._arguments.seed + repetition,
        )
        records, window = self._window(load)
        about = {"target": target.name, "mode": target.mode, "case": case.name, "repetition": repetition}
        window = about | window | window_figures(records)
        if window["failures"] and target.is_direct:
            raise SystemExit(f"the engines or the client fail by themselves: {about}: {window['failures']}")
        if window["failures"]:
            print(f"{about}: {window['failures']}", file=sys.stderr)
        if repetition:
            self.windows.append(window)
            _write(self._windows, [window])
            _write(self._requests, (about | each for each in records))

    def _hold(self, target: Target) -> None:
        """That many streams at once, at a pace that leaves the client room: that they are held is asked here."""
        streams = self._arguments.hold
        self._engines.send(Pace(self._arguments.prefill_ms / 1e3, _HELD_TOKEN_SECONDS))
        ramp = streams / _HELD_BEGUN_PER_SECOND
        # The shortest, a quarter shorter than asked for, outlasts the ramp.
        tokens = int(1.5 * ramp / _HELD_TOKEN_SECONDS) + 2
        load = Load(target, streams, tokens, 1024, ramp, ramp, self._arguments.seed, is_single=True)
        records, window = self._window(load)
        about = {"target": target.name, "mode": target.mode, "case": f"{streams} held", "repetition": 0}
        held = about | window | window_figures(records) | {"most_open": most_open(records)}
        self.held.append(held)
        _write(self._windows, [held])
        _write(self._requests, (about | each for each in records))

    def _window(self, load: Load) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        router = self._routers.get(load.target.name)
        rss_before = _rss(router)
        cpu, began, busy = _cpu_seconds(router), time.monotonic(), _busy_seconds()
        self._client.send(load)
        most = rss_before
        while not self._client.poll(_SAMPLE_SECONDS):
            most = max(most, _rss(router))
        records, client_cpu = self._client.recv()
        wall, spent = time.monotonic() - began, _cpu_seconds(router) - cpu
        return [asdict(each) for each in records], {
            "streams": load.streams,
            "wall_seconds": wall,
            "router_cpu_seconds": spent,
            "client_cpu_seconds": client_cpu,
            "others_cpu_seconds": _busy_seconds() - busy - spent,
            "idle_cpu_share": self._idle.get(load.target.name, 0.0),
            "router_rss_bytes": most,
            "router_rss_before_bytes": rss_before,
        }

    def _idle_share(self, name: str) -> float:
        cpu, began = _cpu_seconds(self._routers[name]), time.monotonic()
        time.sleep(_IDLE_SECONDS)
        return (_cpu_seconds(self._routers[name]) - cpu) / (time.monotonic() - began)

    def _our_command(self, command: Sequence[str]) -> list[str]:
        prefill, decode = (f"http://127.0.0.1:{port}" for port in self._ports[DIRECT])
        return [*command, "router", "--prefill", prefill, "--decode", decode]

    def _their_command(self) -> list[str]:
        prefill, decode = (f"http://127.0.0.1:{port}" for port in self._ports[DIRECT])
        command = [self._arguments.vllm_router, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        # With one worker of a kind there is nothing to choose, and this policy keeps no tree of prompts: the cheapest.
        return [*command, "--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_ports(1)[0])]

    def _start(self, stack: contextlib.ExitStack, name: str, command: Sequence[str]) -> None:
        (port,) = free_ports(1)
        log = stack.enter_context((self._arguments.out / f"{name}.log").open("w"))
        pinned = ["taskset", "-c", str(self._arguments.router_cpu), *command, "--port", str(port)]
        process = subprocess.Popen(pinned, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(_stop, process)
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not answer; see {log.name}")
            time.sleep(0.2)
        self._routers[name] = psutil.Process(process.pid)
        self._ports[name] = (port,)

    def _their_version(self) -> dict[str, str]:
        if not self._arguments.vllm_router:
            return {}
        command = [self._arguments.vllm_router, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        return {THEIRS: said.stdout.strip() or _distribution_version(self._arguments.vllm_router)}


def _can(name: str, mode: Mode, modes: Sequence[Mode]) -> bool:
    """vLLM's router sends D's leg behind P's. Versions of ours are compared in one mode only, to save time."""
    return mode is Mode.PULL if name == THEIRS else mode is modes[0] or not name.startswith(OTHER)


def _distribution_version(command: str) -> str:
    """Of the environment that the command lives in."""
    folders = Path(command).resolve().parent.parent.glob("lib/python*/site-packages/vllm_router-*.dist-info")
    return next((each.name.removeprefix("vllm_router-").removesuffix(".dist-info") for each in folders), "unknown")


def _answers(port: int) -> bool:
    body = msgspec.json.encode({"model": "model", "prompt": "a", "max_tokens": 1, "stream": True})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - our own URL
            return b"[DONE]" in answer.read()
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cpu_seconds(process: psutil.Process | None) -> float:
    times = [each.cpu_times() for each in _family(process)]
    return sum(each.user + each.system for each in times)


def _rss(process: psutil.Process | None) -> int:
    return sum(each.memory_info().rss for each in _family(process))


def _family(process: psutil.Process | None) -> list[psutil.Process]:
    return [] if process is None else [process, *process.children(recursive=True)]


def _busy_seconds() -> float:
    """CPU time of everybody since the machine started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _write(file: TextIO, rows: Any) -> None:
    file.writelines(f"{json.dumps(row)}\n" for row in rows)
    file.flush()


@contextlib.contextmanager
def _child(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process of its own that is given the other end of a pipe first; ends with the block."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that a child that dies shows as the end of the pipe
    try:
        yield ours
        ours.send(None)
        process.join(10)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
