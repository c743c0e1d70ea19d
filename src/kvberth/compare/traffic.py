"""The traffic of one cell, and what goes before it. The same for every mode."""

from dataclasses import replace

import numpy as np

from kvberth.bench import Plan, PlannedRequest, RandomTraffic
from kvberth.bench.plan import TokenIds
from kvberth.compare.plan import Cell
from kvberth.compare.settings import CompareSettings

__all__ = ["cell_plan", "fragmenting_plan", "greeting_plan", "prefix_plan", "settling_plan"]

_GREETING_TOKENS = 64
_SETTLE_TOKENS = (1024, 4096, 16384)
_FRAGMENTING_REQUESTS = 64
_FRAGMENTING_TOKENS = (512, 12288)
_RATE = 8.0
_OTHER = 1_000_003
"""Added to a cell's seed for traffic that is not the cell's."""


def cell_plan(settings: CompareSettings, cell: Cell, repetition: int) -> Plan:
    """What is measured: no warm-up in it, prompts no two alike, the shared part first where there is one."""
    seed = cell.traffic_seed(settings.seed, repetition)
    own_tokens = cell.prompt_tokens - cell.shared_tokens
    plan = RandomTraffic(
        requests=cell.requests,
        rate=cell.rate,
        arrivals=settings.arrivals,
        cancel_share=settings.cancel_share,
        prompt_tokens=own_tokens,
        output_tokens=cell.output_tokens,
        warmup=0,
        seed=seed,
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


def settling_plan(settings: CompareSettings, repetition: int) -> Plan:
    """Prompts of the grid's kind, after which the free blocks are in the order that they stay in."""
    longest = max(settings.prompts)
    lengths = [length for length in _SETTLE_TOKENS if length <= longest] or [longest]
    picked = [lengths[index % len(lengths)] for index in range(settings.warmup_requests)]
    return _mixed(picked, settings.seed + repetition + 2 * _OTHER, output_tokens=16)


def fragmenting_plan(settings: CompareSettings, repetition: int) -> Plan:
    """Prompts of mixed lengths, enough of them to use the emulated profile's cache more than once."""
    seed = settings.seed + repetition + 3 * _OTHER
    lengths = np.random.default_rng(seed).integers(*_FRAGMENTING_TOKENS, size=_FRAGMENTING_REQUESTS)
    return _mixed(lengths.tolist(), seed, output_tokens=32)


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
