"""The traffic of one cell, and what goes before it. The same for every mode."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvberth.bench import Plan, PlannedRequest, RandomTraffic, Trace, TraceTraffic, read_trace
from kvberth.bench.plan import TokenIds
from kvberth.compare.plan import Cell, groups
from kvberth.compare.settings import CompareSettings, TraceChoice

__all__ = [
    "cell_plan",
    "check_traffic",
    "choose_trace",
    "fragmenting_plan",
    "greeting_plan",
    "prefix_plan",
    "settling_plan",
]

_GREETING_TOKENS = 64
_SETTLE_TOKENS = (1024, 4096, 16384)
_FRAGMENTING_REQUESTS = 64
_FRAGMENTING_TOKENS = (512, 12288)
_RATE = 8.0
_OTHER = 1_000_003
"""Added to a cell's seed for traffic that is not the cell's."""


def choose_trace(
    path: Path, *, requests: int, turns: int = 1, speeds: Sequence[float] = (1.0,), skip_bad_rows: bool = False
) -> tuple[TraceChoice, Trace]:
    """Look into a file of recorded traffic, of which the first `requests` are wanted.

    Returns:
        What a comparison keeps of it, and what was read.

    Raises:
        TraceError: it cannot be used.
        ValueError: one line that names the setting and what would be right.
    """
    trace = read_trace(path, requests=requests, turns=turns, skip_bad_rows=skip_bad_rows)
    count = min(requests, sum(len(row.turns) for row in trace.rows))
    times = [row.seconds for row in trace.rows if row.seconds is not None]
    span = max(times) - min(times) if times else 0.0
    choice = TraceChoice(
        file=str(path.resolve()),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        requests=count,
        rate=count / span if span else None,
        speeds=tuple(speeds),
        skip_bad_rows=skip_bad_rows,
    )
    return choice, trace


def check_traffic(settings: CompareSettings) -> None:
    """Draw the first cell's traffic, to find out before anything is started that it cannot be.

    Raises:
        TraceError: the trace cannot be used.
        ValueError: one line that names the setting and what would be right.
    """
    for cell in groups(settings)[0].cells:
        cell_plan(settings, cell, 0)


def cell_plan(settings: CompareSettings, cell: Cell, repetition: int) -> Plan:
    """What is measured: no warm-up in it, the part that is in the caches already first where there is one."""
    seed = cell.traffic_seed(settings.seed, repetition)
    common: dict[str, Any] = {
        "cancel_share": settings.cancel_share,
        "cancel_seconds": settings.cancel_seconds,
        "seed": seed,
    }
    if settings.trace is not None:
        return _trace_plan(settings, settings.trace, cell, warmup=0, **common)
    plan = RandomTraffic(
        requests=cell.requests,
        rate=cell.rate,
        arrivals=settings.arrivals,
        prompt_tokens=cell.prompt_tokens - cell.shared_tokens,
        output_tokens=cell.output_tokens,
        prefix_share=settings.prefix_share,
        prefixes=settings.prefixes,
        turns=settings.turns,
        warmup=0,
        **common,
    ).plan()
    return _behind(_shared(cell, seed), plan) if cell.shared_tokens else plan


def prefix_plan(settings: CompareSettings, cell: Cell, repetition: int) -> Plan:
    """One request that puts the cell's shared part into the caches."""
    seed = cell.traffic_seed(settings.seed, repetition)
    own_tokens = cell.prompt_tokens - cell.shared_tokens
    plan = RandomTraffic(requests=1, prompt_tokens=own_tokens, output_tokens=2, warmup=0, seed=seed + _OTHER).plan()
    return _behind(_shared(cell, seed), plan)


def greeting_plan(settings: CompareSettings, repetition: int) -> Plan:
    """Short prompts, with which connections are made and code is loaded, and hardly any memory is touched."""
    return RandomTraffic(
        requests=4,
        rate=_RATE,
        prompt_tokens=_GREETING_TOKENS,
        output_tokens=4,
        warmup=0,
        seed=settings.seed + repetition + _OTHER,
    ).plan()


def settling_plan(settings: CompareSettings, cells: Sequence[Cell], repetition: int) -> Plan:
    """Prompts of the cells' kind, after which the free blocks are in the order that they stay in."""
    seed = settings.seed + repetition + 2 * _OTHER
    if settings.trace is not None:
        plan = _trace_plan(settings, settings.trace, cells[0], warmup=settings.warmup_requests, seed=seed)
        return Plan(tuple(replace(each, arrival_seconds=each.index / _RATE) for each in plan.warmup))
    longest = max(settings.prompts)
    lengths = [length for length in _SETTLE_TOKENS if length <= longest] or [longest]
    picked = [lengths[index % len(lengths)] for index in range(settings.warmup_requests)]
    return _mixed(picked, seed, output_tokens=16)


def fragmenting_plan(settings: CompareSettings, repetition: int) -> Plan:
    """Prompts of mixed lengths, enough of them to use the emulated profile's cache more than once."""
    seed = settings.seed + repetition + 3 * _OTHER
    lengths = np.random.default_rng(seed).integers(*_FRAGMENTING_TOKENS, size=_FRAGMENTING_REQUESTS)
    return _mixed(lengths.tolist(), seed, output_tokens=32)


def _trace_plan(settings: CompareSettings, choice: TraceChoice, cell: Cell, **common: Any) -> Plan:
    trace = read_trace(
        Path(choice.file), requests=choice.requests, turns=settings.turns, skip_bad_rows=choice.skip_bad_rows
    )
    pace: dict[str, Any] = {"rate": cell.rate} if cell.speed is None else {"speed": cell.speed}
    return TraceTraffic(
        trace=trace,
        requests=choice.requests,
        arrivals=settings.arrivals,
        **pace,
        output_tokens=settings.output_tokens,
        **common,
    ).plan()


def _mixed(lengths: list[int], seed: int, output_tokens: int) -> Plan:
    generator = np.random.default_rng(seed)
    return Plan(
        tuple(
            PlannedRequest(index, index / _RATE, _random_tokens(generator, length), output_tokens)
            for index, length in enumerate(lengths)
        )
    )


def _shared(cell: Cell, seed: int) -> TokenIds:
    return _random_tokens(np.random.default_rng(seed), cell.shared_tokens)


def _random_tokens(generator: np.random.Generator, count: int) -> TokenIds:
    low, high = RandomTraffic().token_range
    return generator.integers(low, high, size=count, dtype=np.int32)


def _behind(shared: TokenIds, plan: Plan) -> Plan:
    """The plan with `shared` before each prompt."""
    return Plan(
        tuple(replace(each, prompt_token_ids=np.concatenate([shared, each.prompt_token_ids])) for each in plan.requests)
    )
