"""What the router costs, beside vllm-router: `python -m benchmarks.router --out DIR`, seven minutes, two quiet cores.

Engines that take no time of their own, the client, and each router in a process of its own; a router has one core to
itself, engines and client share the others. The client asks the engines directly, through this router and through
vllm-router in turns, at the same pace. docs/router.md says how to read it.

`DIR/windows.jsonl` has a line per window, `DIR/requests.jsonl` one per request, `DIR/run.json` the machine, versions
and settings.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
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
from benchmarks.router_figures import DIRECT, added_rows, cost_rows, most_open, window_figures
from benchmarks.router_load import Load, Mode, Target, serve_client
from rich.console import Console
from rich.table import Table

from kvberth.bench.machine import machine, versions

_SPAWN = multiprocessing.get_context("spawn")
_START_SECONDS = 60.0
_IDLE_SECONDS = 3.0
_SAMPLE_SECONDS = 0.1

OURS = "kvberth"
THEIRS = "vllm-router"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    streams: int
    tokens: int
    pace: Pace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the raw records")
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router", path=_path()), help="its command")
    parser.add_argument("--ours", nargs="+", default=[sys.executable, "-m", "kvberth"], help="the kvberth command")
    parser.add_argument("--other", nargs="+", help="a second kvberth command, measured in turn: another version")
    parser.add_argument("--modes", nargs="+", type=Mode, default=list(Mode), choices=list(Mode))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 50, 200])
    parser.add_argument("--tokens", type=int, default=64, help="per request")
    parser.add_argument("--prefill-ms", type=float, default=50.0)
    parser.add_argument("--token-ms", type=float, default=25.0, help="between two tokens of a stream")
    parser.add_argument("--in-steps", action="store_true", help="all streams get their tokens at once")
    parser.add_argument("--prompt-bytes", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=5.0, help="per window, of them --ramp not counted")
    parser.add_argument("--ramp", type=float, default=1.5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hold", type=int, default=2000, help="streams to be held at once; 0: no such test")
    parser.add_argument("--router-cpu", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    console = Console(width=max(150, Console().width))
    with Bench(arguments) as bench:
        bench.run()
    show_added(console, bench.windows)
    show_costs(console, bench.windows)
    show_held(console, bench.held)


def _path() -> str:
    """Commands of this environment come first, whether it is activated or not."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def cases(arguments: argparse.Namespace) -> list[Case]:
    """One per number of streams, and one with short answers: its mix tells a request's cost from a token's."""
    pace = Pace(arguments.prefill_ms / 1e3, arguments.token_ms / 1e3, arguments.in_steps)
    # A single stream takes its time to give as many requests as many do: shorter answers, the same steps.
    rows = [Case(f"{n}", n, arguments.tokens if n > 1 else 4, pace) for n in arguments.streams]
    return [*rows, Case("16, short answers", 16, 1, pace)]


class Bench:
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

    def __enter__(self) -> "Bench":
        with contextlib.ExitStack() as stack:
            self._engines = stack.enter_context(_child(serve_engines, self._others))
            self._client = stack.enter_context(_child(serve_client, self._others))
            self._ports[DIRECT] = tuple(self._engines.recv())
            self._client.recv()
            self._requests = stack.enter_context((self._arguments.out / "requests.jsonl").open("w"))
            self._windows = stack.enter_context((self._arguments.out / "windows.jsonl").open("w"))
            commands = {OURS: self._arguments.ours, "kvberth, other": self._arguments.other}
            for name, command in commands.items():
                if command is not None:
                    self._start(stack, name, self._our_command(command))
            if self._arguments.vllm_router is not None:
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
        targets = [Target(name, mode, self._ports[name]) for mode in arguments.modes for name in self._ports]
        targets = [each for each in targets if each.name != THEIRS or each.mode is Mode.PULL]  # all that it does
        source = random.Random(arguments.seed)  # noqa: S311 - no secret
        for repetition in range(arguments.repeat + 1):
            for case in cases(arguments):
                for target in source.sample(targets, len(targets)):
                    self._measure(target, case, repetition, seconds=arguments.seconds if repetition else 1.0)
        if arguments.hold:
            for target in targets:
                self._hold(target)

    def _measure(self, target: Target, case: Case, repetition: int, seconds: float) -> None:
        self._engines.send(case.pace)
        load = Load(
            target=target,
            streams=case.streams,
            tokens=case.tokens,
            prompt_bytes=self._arguments.prompt_bytes,
            seconds=seconds,
            ramp_seconds=self._arguments.ramp if repetition else 0.5,
            seed=self._arguments.seed + repetition,
        )
        records, window = self._window(load)
        about = {"target": target.name, "mode": target.mode, "case": case.name, "repetition": repetition}
        window = about | window | window_figures(records)
        if window["failures"] and target.is_direct:
            raise SystemExit(f"the engines or the client fail by themselves: {about}: {window['failures']}")
        if window["failures"]:
            print(f"{about}: {window['failures']}", file=sys.stderr)
        if repetition:  # the first round warms up
            self.windows.append(window)
            _write(self._windows, [window])
            _write(self._requests, (about | each for each in records))

    def _hold(self, target: Target) -> None:
        """That many streams at once, at a pace that leaves the client room: that they are held is asked here."""
        streams = self._arguments.hold
        self._engines.send(Pace(self._arguments.prefill_ms / 1e3, 0.5))
        ramp = streams / 400
        load = Load(target, streams, int(2 * ramp * 1.5) + 2, 1024, ramp, ramp, self._arguments.seed, is_single=True)
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
        # With one worker of a kind there is nothing to choose: the policy that keeps no tree of prompts is the cheapest.
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
        if self._arguments.vllm_router is None:
            return {}
        command = [self._arguments.vllm_router, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        return {THEIRS: said.stdout.strip() or _distribution_version(self._arguments.vllm_router)}


def _distribution_version(command: str) -> str:
    """Of the environment that the command lives in."""
    folders = Path(command).resolve().parent.parent.glob("lib/python*/site-packages/vllm_router-*.dist-info")
    return next((each.name.removeprefix("vllm_router-").removesuffix(".dist-info") for each in folders), "unknown")


def _answers(port: int) -> bool:
    body = msgspec.json.encode({"model": "model", "prompt": "a", "max_tokens": 1, "stream": True})
    request = urllib.request.Request(  # noqa: S310 - our own URL
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


def show_added(console: Console, windows: Sequence[dict[str, Any]]) -> None:
    """Rows of a router are what it adds; those of `direct` are the times themselves."""
    table = Table(
        "streams",
        "mode",
        "who",
        "TTFT p50 (spread)",
        "p95",
        "p99",
        "token's delay p50",
        "p95",
        "p99",
        "ITL p50",
        "p99",
        "req/s",
        "tokens/s",
        "router's cores",
        "all other cores",
        "RSS, MB",
        "failed",
        title="Directly, ms, and what a router adds, ms",
    )
    for row in sorted(added_rows(windows), key=lambda row: (len(row["case"]), row["case"], row["mode"], row["target"])):
        low, high = row["ttft_ms_p50"][1:]
        table.add_row(
            row["case"],
            row["mode"],
            row["target"],
            f"{row['ttft_ms_p50'][0]:.2f} ({low:.2f} to {high:.2f})",
            *(_first(row, name) for name in ("ttft_ms_p95", "ttft_ms_p99")),
            *(_first(row, f"delay_ms_{quantile}") for quantile in ("p50", "p95", "p99")),
            *(_first(row, f"itl_ms_{quantile}") for quantile in ("p50", "p99")),
            f"{row['requests_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['cores']:.2f}",
            f"{row['others_cores']:.2f}",
            f"{row['rss_bytes'] / 1e6:.0f}",
            f"{row['failed']}",
        )
    console.print(table)


def _first(row: dict[str, Any], name: str) -> str:
    return f"{row[name][0]:.2f}" if name in row else ""


def show_costs(console: Console, windows: Sequence[dict[str, Any]]) -> None:
    table = Table("who", "mode", "per request, ms", "per 1,000 tokens, ms", title="CPU time of a router")
    for row in cost_rows(windows):
        per_request, per_thousand = row["cpu_seconds_per_request"], row["cpu_seconds_per_1000_tokens"]
        table.add_row(row["target"], row["mode"], f"{1e3 * per_request:.3f}", f"{1e3 * per_thousand:.1f}")
    console.print(table)


def show_held(console: Console, held: Sequence[dict[str, Any]]) -> None:
    if not held:
        return
    table = Table("who", "mode", "open at once", "failed", "kB per stream", "delay p99, ms", title="Streams held")
    for row in held:
        grown = row["router_rss_bytes"] - row["router_rss_before_bytes"]
        table.add_row(
            row["target"],
            row["mode"],
            f"{row['most_open']}",
            f"{sum(row['failures'].values())}",
            f"{grown / row['streams'] / 1e3:.1f}",
            f"{row['delay_ms']['p99']:.1f}" if "delay_ms" in row else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
