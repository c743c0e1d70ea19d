"""What the mover costs: `python -m benchmarks.mover [--out FILE]`, eight minutes, on a machine that is otherwise quiet.

Three things, between real processes over NIXL's shared memory, each a median of repetitions whose cases take turns:
planning and posting one transfer, beside a connector with a descriptor per layer and block; what the mover's thread
costs the steps of the engine whose process it is in; and what it costs when nothing moves. docs/mover.md says how to
read it.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.mover_load import Load, Setup, Window, WindowResult
from benchmarks.mover_memory import Layout
from benchmarks.mover_posting import Blocks, Order, Poster
from rich.console import Console
from rich.table import Table

from benchmarks import free_queue, mover_load, mover_posting
from kvberth.bench.machine import machine, versions

_SPAWN = multiprocessing.get_context("spawn")
_SETTLE_SECONDS = 0.3
_LIMIT_PERCENT = 2.0
"""Of a step: what the thread may cost before it would have to be a process."""

PAIRS = tuple((load, layout) for layout in Layout for load in Load if load is not Load.NONE)
"""Each is measured twice in a row: with the engine's own mover, and with that of another process."""

IDLE = "nothing moves"
OWN = "in the engine"
OTHER = "in another process"
_TESTED = {IDLE: "engine", OWN: "engine", OTHER: "carrier"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new JSON file for the raw records")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1000, help="per transfer")
    parser.add_argument("--page-bytes", nargs="+", type=int, default=[16, 2048], help="per layer and block, posting")
    parser.add_argument("--load-page-bytes", type=int, default=128, help="the same, under load")
    parser.add_argument("--rate", type=float, default=8.0, help="transfers per second under load")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of load per case and repetition")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of idleness per repetition")
    parser.add_argument("--use", type=float, default=0.7, help="of both engines' blocks in the steady state")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.out and arguments.out.exists():
        raise SystemExit(f"{arguments.out} is there already")
    console = Console(width=max(170, Console().width))
    began, before = time.monotonic(), _busy_seconds()
    simulated, num_blocks = steady_blocks(arguments)
    record = {
        "settings": {key: value for key, value in vars(arguments).items() if key != "out"} | {"pool": num_blocks},
        "machine": machine(),
        "versions": versions()
        | {name: version(name) for name in ("nixl", "pyzmq")}
        | {"vllm": free_queue.vllm_version()},
        "posting": measure_posting(arguments, simulated, num_blocks),
        "steps": measure_steps(arguments, simulated[Order.EQUAL], num_blocks),
    }
    record["others_share"] = (_busy_seconds() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
    show_posting(console, record["posting"])
    show_steps(console, record["steps"])
    show_idle(console, record["steps"])
    console.print(f"Other processes used {record['others_share']:.1%} of the cores meanwhile.")
    if arguments.out:
        arguments.out.write_text(json.dumps(record))


def steady_blocks(arguments: argparse.Namespace) -> tuple[dict[Order, list[Blocks]], int]:
    """Pairs of blocks of long prompts on two engines that have been serving for a while, and how many blocks there are.

    Prefix caching is off, as in the published comparison, and the free lists are vLLM's own.
    """
    wanted = arguments.blocks
    as_vllm_does, before_each = free_queue.POLICIES[0], free_queue.POLICIES[-1]
    longest = (free_queue.PROMPT_TOKENS[1],) * 2
    simulated, highest = {}, 0
    for order, policy, lengths, prompts in (
        (Order.EQUAL, as_vllm_does, longest, 1500),
        (Order.MIXED, as_vllm_does, free_queue.PROMPT_TOKENS, 5000),
        (Order.SORTED, before_each, free_queue.PROMPT_TOKENS, 1500),
    ):
        pair = free_queue.simulate(
            use=arguments.use, caching=False, policy=policy, seed=arguments.seed, prompts=prompts, lengths=lengths
        )
        long = [each for each in pair.transfers(prompts - 500) if len(each[0]) >= wanted]
        if not long:
            raise SystemExit(f"no prompt of the simulated traffic has {wanted} blocks")
        simulated[order] = [(ours[:wanted], theirs[:wanted]) for ours, theirs in long]
        highest = max(highest, *(max(blocks) for each in simulated[order] for blocks in each))
    return simulated, max(highest + 1, 2 * wanted)


# Posting.


def measure_posting(
    arguments: argparse.Namespace, simulated: dict[Order, Sequence[Blocks]], num_blocks: int
) -> list[dict[str, Any]]:
    """A record per transfer. The first round is checked for its bytes, and not counted."""
    shapes = [(layout, arguments.layers, num_blocks, size) for size in arguments.page_bytes for layout in Layout]
    source = random.Random(arguments.seed)  # noqa: S311 - no secret
    typical = {order: nearest_the_median(pairs, arguments.repeat + 1) for order, pairs in simulated.items()}
    records = []
    with _child(mover_posting.serve_target, shapes) as pipe:
        rig = mover_posting.Rig(pipe, shapes)
        for repetition in range(arguments.repeat + 1):
            turns = mover_posting.cases(arguments.page_bytes)
            source.shuffle(turns)
            orders = {order: _blocks(order, arguments.blocks, num_blocks, typical, repetition) for order in Order}
            for case in turns:
                pairs = orders[case.order]
                sample = rig.measure(case, pairs)
                if repetition == 0:
                    rig.check(case, pairs)
                    continue
                records.append(asdict(case) | asdict(sample) | {"repetition": repetition})
        rig.close()
    return records


def nearest_the_median(pairs: Sequence[Blocks], count: int) -> list[Blocks]:
    """Those transfers whose number of runs is the most ordinary: with prompts of one length they differ a lot."""
    ranked = sorted(pairs, key=lambda each: free_queue.runs_of(*each))
    first = max(0, (len(ranked) - count) // 2)
    return ranked[first : first + count]


def _blocks(
    order: Order, count: int, num_blocks: int, simulated: dict[Order, Sequence[Blocks]], repetition: int
) -> Blocks:
    if order in simulated:
        return simulated[order][repetition % len(simulated[order])]
    if order is Order.CONTIGUOUS:
        return tuple(range(1, 1 + count)), tuple(range(num_blocks - count, num_blocks))
    source = random.Random(repetition)  # noqa: S311 - no secret
    return source.sample(range(num_blocks), count), source.sample(range(num_blocks), count)


def posting_rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians per case, with the ratios to the naive connector on the same blocks and pages."""
    names = ("poster", "layout", "order", "page_bytes")
    figures = ("descriptors", "plan_ms", "post_ms", "landed_ms", "thread_cpu_ms")
    rows = []
    for key, group in _grouped(records, names).items():
        row = dict(zip(names, key, strict=True)) | {
            name: statistics.median(each[name] for each in group) for name in figures
        }
        row["cost_ms"] = statistics.median(each["plan_ms"] + each["post_ms"] for each in group)
        row["cost_spread_ms"] = [edge(each["plan_ms"] + each["post_ms"] for each in group) for edge in (min, max)]
        rows.append(row)
    naive = {(row["order"], row["page_bytes"]): row for row in rows if row["poster"] == Poster.NAIVE}
    for row in rows:
        base = naive[row["order"], row["page_bytes"]]
        row["descriptors_ratio"] = row["descriptors"] / base["descriptors"]
        row["cost_ratio"] = row["cost_ms"] / base["cost_ms"]
    order = [asdict(case) for case in mover_posting.cases(sorted({row["page_bytes"] for row in rows}))]
    return sorted(rows, key=lambda row: order.index({name: row[name] for name in names}))


def show_posting(console: Console, records: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "page",
        "who",
        "layout",
        "blocks",
        "descriptors",
        "plan, ms",
        "post, ms",
        "both (spread)",
        "thread's CPU, ms",
        "landed, ms",
        "descriptors / naive",
        "both / naive",
        title="One transfer",
    )
    for row in posting_rows(records):
        table.add_row(
            f"{row['page_bytes']:,} B",
            row["poster"],
            row["layout"],
            row["order"],
            f"{row['descriptors']:,.0f}",
            f"{row['plan_ms']:.2f}",
            f"{row['post_ms']:.2f}",
            f"{row['cost_ms']:.2f} ({row['cost_spread_ms'][0]:.2f} to {row['cost_spread_ms'][1]:.2f})",
            f"{row['thread_cpu_ms']:.2f}",
            f"{row['landed_ms']:.1f}",
            f"{row['descriptors_ratio']:.4f}",
            f"{row['cost_ratio']:.3f}",
        )
    console.print(table)


# Steps and idleness.


def measure_steps(arguments: argparse.Namespace, steady: Sequence[Blocks], num_blocks: int) -> dict[str, Any]:
    """Per window what the engine saw, and per repetition what an idle process took."""
    places = [(name, layout) for name in ("engine", "peer", "carrier", "idle") for layout in Layout]
    ports = dict(zip(places, mover_load.free_ports(len(places)), strict=True))
    setup = Setup(arguments.layers, num_blocks, arguments.load_page_bytes, ports, tuple(steady))
    windows, idle = [], []
    with contextlib.ExitStack() as stack:
        pipes = {
            "engine": stack.enter_context(_child(mover_load.serve_engine, setup)),
            "peer": stack.enter_context(_child(mover_load.serve_rank, "peer", setup)),
            "carrier": stack.enter_context(_child(mover_load.serve_rank, "carrier", setup)),
        }
        for pipe in pipes.values():
            pipe.recv()
        numbers = iter(range(10_000))
        source = random.Random(arguments.seed)  # noqa: S311 - no secret

        def window(load: Load, layout: Layout, seconds: float) -> Window:
            starts = time.monotonic() + _SETTLE_SECONDS
            return Window(next(numbers), load, layout, starts, seconds, arguments.rate)

        for repetition in range(arguments.repeat + 1):
            pairs = list(PAIRS)
            source.shuffle(pairs)
            turns = [(where, *pair) for pair in pairs for where in source.sample((OWN, OTHER), 2)]
            for where, load, layout in ((IDLE, Load.NONE, Layout.BLOCK_MAJOR), *turns):
                asked = window(load, layout, arguments.window if repetition else 1.0)
                for pipe in pipes.values():
                    pipe.send((asked, _TESTED[where]))
                results = {name: pipe.recv() for name, pipe in pipes.items()}
                if repetition:  # the first round connects, and warms up
                    case = {"where": where, "load": load, "layout": layout, "repetition": repetition}
                    windows.append(case | window_record(results["engine"], results[_TESTED[where]]))
        for _ in range(arguments.repeat):
            shares = {}
            for name, one in (("with a mover", setup), ("without", None)):
                with _child(mover_load.idle_cpu_share, one, arguments.idle) as pipe:
                    if one is not None:
                        pipe.recv()
                        asked = Window(next(numbers), Load.RECEIVES, Layout.BLOCK_MAJOR, time.monotonic(), 1.0, 1.0)
                        pipe.send(asked)
                        pipes["peer"].send((asked, "idle"))
                        pipes["peer"].recv()
                    shares[name] = pipe.recv()
            idle.append(shares)
        for pipe in pipes.values():
            pipe.send(None)
    return {"windows": windows, "idle": idle}


def window_record(engine: WindowResult, tested: WindowResult) -> dict[str, Any]:
    """The steps of the engine, and where their time went: means per step."""
    count = len(engine.step_seconds)
    total = sum(engine.step_seconds)
    return {
        "step_ms": [round(1e3 * each, 3) for each in engine.step_seconds],
        "ran_ms": 1e3 * engine.ran_seconds / count,
        "core_wait_ms": 1e3 * engine.core_wait_seconds / count,
        "blocked_ms": 1e3 * (total - engine.ran_seconds - engine.core_wait_seconds) / count,
        "mover_cpu_share": tested.mover_cpu_seconds / tested.took,
        "transfers": tested.ended,
    }


def step_rows(windows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians per case, and for each load what its own mover costs the engine beyond one of another process.

    That is in percent of a step of the window with the other process's mover in the same repetition: `longer` is all
    of it, `blocked` the part in which the step's thread neither ran nor waited for a core.
    """
    names = ("load", "layout", "where")
    groups = _grouped(windows, names)
    rows = []
    for load, layout in ((Load.NONE, Layout.BLOCK_MAJOR), *PAIRS):
        for where in (IDLE,) if load is Load.NONE else (OTHER, OWN):
            group = groups[load, layout, where]
            row: dict[str, Any] = {"load": load, "layout": layout, "where": where}
            for name, of in (("p50_ms", partial(np.percentile, q=50)), ("p99_ms", partial(np.percentile, q=99))):
                row[name] = statistics.median(float(of(each["step_ms"])) for each in group)
            for name in ("ran_ms", "core_wait_ms", "blocked_ms"):
                row[name] = statistics.median(each[name] for each in group)
            row["mean_ms"] = statistics.median(float(np.mean(each["step_ms"])) for each in group)
            row["mover_cpu_percent"] = 100 * statistics.median(each["mover_cpu_share"] for each in group)
            row["transfers"] = sum(each["transfers"] for each in group)
            row["steps"] = sum(len(each["step_ms"]) for each in group)
            if where == OWN:
                others = {each["repetition"]: each for each in groups[load, layout, OTHER]}
                for name, of in (("longer", "step_ms"), ("blocked", "blocked_ms")):
                    row[name] = [_grown_percent(each, others[each["repetition"]], of) for each in group]
            rows.append(row)
    return rows


def _grown_percent(window: dict[str, Any], other: dict[str, Any], name: str) -> float:
    return float(100 * (np.mean(window[name]) - np.mean(other[name])) / np.mean(other["step_ms"]))


def show_steps(console: Console, measured: dict[str, Any]) -> None:
    table = Table(
        "load",
        "layout",
        "mover",
        "step p50, ms",
        "p99, ms",
        "mean, ms",
        "ran",
        "waited for a core",
        "blocked",
        "longer than in another process, % (spread)",
        "of it blocked, % (spread)",
        "mover's CPU",
        "transfers",
        title=f"Steps of the engine; the limit is {_LIMIT_PERCENT:g}%",
    )
    for row in step_rows(measured["windows"]):
        table.add_row(
            row["load"],
            "" if row["load"] == Load.NONE else row["layout"],
            row["where"],
            f"{row['p50_ms']:.3f}",
            f"{row['p99_ms']:.2f}",
            f"{row['mean_ms']:.3f}",
            f"{row['ran_ms']:.3f}",
            f"{row['core_wait_ms']:.3f}",
            f"{row['blocked_ms']:.3f}",
            *(_median_and_spread(row.get(name)) for name in ("longer", "blocked")),
            f"{row['mover_cpu_percent']:.1f}%",
            f"{row['transfers']}",
        )
    console.print(table)


def _median_and_spread(figures: list[float] | None) -> str:
    return "" if figures is None else f"{statistics.median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def show_idle(console: Console, measured: dict[str, Any]) -> None:
    table = Table("idle process", "CPU seconds per second (spread)", title="Idle")
    for name in measured["idle"][0]:
        shares = [each[name] for each in measured["idle"]]
        table.add_row(name, f"{statistics.median(shares):.6f} ({min(shares):.6f} to {max(shares):.6f})")
    console.print(table)


# Both.


@contextlib.contextmanager
def _child(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process of its own that is given the other end of a pipe first; ends with the block."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that a child that dies shows as the end of the pipe
    try:
        yield ours
        process.join(10)
    finally:
        if process.is_alive():
            process.kill()
            process.join()


def _grouped(records: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in records:
        groups.setdefault(tuple(each[name] for name in names), []).append(each)
    return groups


def _busy_seconds() -> float:
    """CPU time of everybody but us and our children that have ended, since the machine started."""
    times, own = psutil.cpu_times(), os.times()
    everybody = times.user + times.nice + times.system + times.irq + times.softirq
    return everybody - sum(own[:4])


if __name__ == "__main__":
    main()
