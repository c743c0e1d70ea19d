"""Early, just-in-time, late and automatic binding on uneven decode workers: `python -m benchmarks.binding --out DIR`

One prefill and three decode workers, emulated. One of the three is slowed now and then by load that does not come
through the router: prompts that it computes itself, for 3 s out of 10. Short and long prompts, at light load and at 70%
of what the prefill worker can do; each repetition runs all four kinds of binding on the same traffic, in an order that
rotates, so that a machine that drifts hurts all alike. `DIR/runs.jsonl` has a line per run and `DIR/raw/` a line per
request; the table is of all requests of all repetitions. T13 and T14 are taken from long prompts under heavy load.

What an early choice costs is load that changes between the choice and the first token, here two and a half seconds:
load that stays is seen by all, and load that comes once a minute meets few requests.

The emulated machine is the slower one of the two that there are: four engines that step every 6 ms leave two cores no
room to be on time. A cell takes twenty minutes.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from kvberth import bench
from kvberth.launch import ClusterSettings, LocalCluster
from kvberth.launch.metrics import EngineMetrics

BINDINGS = ("early", "jit", "late", "auto")
OUTPUT_TOKENS = 64
BURST_SECONDS, PAUSE_SECONDS = 3.0, 7.0
BURST_TOKENS = 8192
DECODE_CHUNK = 2048
"""As decode workers are set up whose streams are not to wait long for a prompt; it is also seen sooner that they do."""
RESERVED = "kvberth:reserved_block_seconds_total"


@dataclass(frozen=True)
class Run:
    """One binding's turn in a repetition; reserved memory is per request."""

    cell: str
    binding: str
    repetition: int
    reserved_block_seconds: float
    records: Sequence[bench.RequestRecord]

    def line(self) -> dict[str, Any]:
        """For people who look at one run."""
        said: dict[str, Any] = {"cell": self.cell, "binding": self.binding, "repetition": self.repetition}
        return said | figures([self])[self.cell, self.binding]


@dataclass(frozen=True)
class Cell:
    """One kind of traffic."""

    name: str
    prompt_tokens: int
    rate: float


CELLS = (
    Cell("short, light", 1024, 6.0),
    Cell("short, heavy", 1024, 12.0),
    Cell("long, light", 32768, 0.23),
    Cell("long, heavy", 32768, 0.47),
)
"""An emulated prefill worker (Llama-3.3-70B on 8 x H100) reads a prompt of 32k in 1.5 s, one of 1k in 36 ms. Heavy is
70% of that, light half as much; of the short ones heavy is what two cores can still emulate."""
UNEVEN = "long, heavy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="llama-3.3-70b-8xh100")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], default=[UNEVEN])
    parser.add_argument("--bindings", nargs="+", choices=BINDINGS, default=list(BINDINGS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=110.0, help="of sending, per run")
    arguments = parser.parse_args()
    (arguments.out / "raw").mkdir(parents=True, exist_ok=True)
    runs = []
    settings = ClusterSettings(
        model=arguments.profile,
        emulate=True,
        prefill=1,
        decode=3,
        prefix_caching=False,
        decode_args=("--max-num-batched-tokens", str(DECODE_CHUNK)),
    )
    with LocalCluster(settings, Console(stderr=True)) as cluster:
        for cell in (cell for cell in CELLS if cell.name in arguments.cells):
            teach(cluster, cell)
            for repetition in range(arguments.repetitions):
                for turn in range(len(arguments.bindings)):
                    binding = arguments.bindings[(turn + repetition) % len(arguments.bindings)]
                    run = measure(cluster, cell, binding, repetition, arguments)
                    runs.append(run)
                    line = json.dumps(run.line())
                    with (arguments.out / "runs.jsonl").open("a") as file:
                        file.write(line + "\n")
                    print(line, flush=True)
    show(runs)


def teach(cluster: LocalCluster, cell: Cell) -> None:
    """The router learns how fast its engines are, and the engines' memory is not fresh any more."""
    plan = traffic(cell, seconds=12.0, seed=99).plan()
    asyncio.run(bench.run(plan, bench.Target(url=cluster.router_url, headers={"x-kvberth-binding": "jit"})))


def traffic(cell: Cell, seconds: float, seed: int) -> bench.RandomTraffic:
    return bench.RandomTraffic(
        requests=max(10, round(cell.rate * seconds)),
        rate=cell.rate,
        arrivals=bench.Arrivals.POISSON,
        prompt_tokens=cell.prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        warmup=1,
        seed=seed,
    )


def measure(cluster: LocalCluster, cell: Cell, binding: str, repetition: int, arguments: argparse.Namespace) -> Run:
    """One run: the traffic through the router, the bursts past it."""
    metrics = [EngineMetrics(engine.url) for engine in cluster.decode]
    before = sum(each.value(RESERVED) for each in metrics)
    plan = traffic(cell, arguments.seconds, seed=repetition).plan()
    target = bench.Target(url=cluster.router_url, headers={"x-kvberth-binding": binding})
    result = asyncio.run(_with_bursts(plan, target, cluster.decode[0].url, cluster.settings.model_name))
    name = f"{cell.name.replace(', ', '-')}-{binding}-{repetition}.jsonl"
    bench.write_records(arguments.out / "raw" / name, result.records)
    time.sleep(1.0)  # until the last transfers have been counted
    reserved = sum(each.value(RESERVED) for each in metrics) - before
    for warning in result.summary.warnings:
        print(f"{name}: {warning}", flush=True)
    return Run(cell.name, binding, repetition, reserved / len(result.records), result.records)


async def _with_bursts(plan: bench.Plan, target: bench.Target, victim: str, model: str) -> bench.RunResult:
    bursts = asyncio.create_task(_burst(victim, model))
    try:
        return await bench.run(plan, target)
    finally:
        bursts.cancel()
        await asyncio.gather(bursts, return_exceptions=True)


async def _burst(victim: str, model: str) -> None:
    """Prompts that one decode worker computes itself, two at a time."""
    generator = np.random.default_rng(7)
    prompts = [generator.integers(1000, 20000, BURST_TOKENS).tolist() for _ in range(64)]
    bodies = [json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode() for prompt in prompts]
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask_until(end: float) -> None:
            while time.monotonic() < end:
                async with session.post(f"{victim}/v1/completions", data=bodies[generator.integers(64)]) as answer:
                    await answer.read()

        while True:
            await asyncio.sleep(PAUSE_SECONDS)
            end = time.monotonic() + BURST_SECONDS
            await asyncio.gather(ask_until(end), ask_until(end))


def figures(runs: Iterable[Run]) -> dict[tuple[str, str], dict[str, float]]:
    """Of all requests of a cell's repetitions with one binding; by cell and binding."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.cell, run.binding), []).append(run)
    found = {}
    for key, group in groups.items():
        summary = bench.summarise([record for run in group for record in run.records])
        found[key] = {"requests": float(summary.requests), "failed": float(summary.failed)}
        for name, percentiles in (("ttft_ms", summary.ttft_ms), ("tpot_ms", summary.tpot_ms)):
            for share in ("p50", "p95", "p99"):
                found[key][f"{name}_{share}"] = round(getattr(percentiles, share), 2)
        # All of them have the same requests.
        found[key]["reserved_block_seconds"] = round(mean(run.reserved_block_seconds for run in group), 3)
    return found


def verdicts(found: Mapping[tuple[str, str], Mapping[str, float]]) -> list[tuple[str, float, float]]:
    """(what, ratio, at most) of everything that is aimed at and was measured."""

    def ratio(cell: str, figure: str, one: str, other: str) -> float:
        return found[cell, one][figure] / found[cell, other][figure]

    aims = []
    if {(UNEVEN, each) for each in ("early", "jit", "late")} <= set(found):
        for binding in ("jit", "late"):
            aims.append((f"T13 TPOT p95, {binding} / early", ratio(UNEVEN, "tpot_ms_p95", binding, "early"), 0.75))
        aims.append(("T13 TTFT p50, jit / early", ratio(UNEVEN, "ttft_ms_p50", "jit", "early"), 1.10))
        reserved = ratio(UNEVEN, "reserved_block_seconds", "jit", "early")
        aims.append(("T14 reserved block-seconds, jit / early", reserved, 0.4))
    for cell in dict.fromkeys(cell for cell, _ in found):
        if {(cell, each) for each in ("early", "jit", "auto")} <= set(found):
            for figure in ("ttft_ms_p50", "tpot_ms_p95"):
                best = min(("early", "jit"), key=lambda each: found[cell, each][figure])
                aims.append((f"{cell}: {figure}, auto / {best}", ratio(cell, figure, "auto", best), 1.05))
    return aims


def show(runs: Iterable[Run]) -> None:
    found = figures(runs)
    table = Table("traffic", "binding", "TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "reserved block-s", "failed")
    for (cell, binding), each in found.items():
        table.add_row(
            cell,
            binding,
            f"{each['ttft_ms_p50']:.0f} / {each['ttft_ms_p95']:.0f}",
            f"{each['tpot_ms_p50']:.2f} / {each['tpot_ms_p95']:.2f}",
            f"{each['reserved_block_seconds']:.1f}",
            f"{each['failed']:.0f}",
        )
    console = Console(width=140)
    console.print(table)
    for what, value, limit in verdicts(found):
        console.print(f"{what}: {value:.2f} ({'met' if value <= limit else 'missed'}, at most {limit:g})")


if __name__ == "__main__":
    main()
