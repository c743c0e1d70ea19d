"""Would an engine's free list in order of block id keep runs long? `python -m benchmarks.free_queue [--out FILE]`

vLLM's own `BlockPool` on both sides, the same random prompts through both; nothing is transferred. vLLM puts freed
blocks back in reversed order: at the head of its free list those without a hash (all of them when prefix caching is
off), at the tail those that are cached. The policies sort the part without hashes, which comes first and is free to be
used in any order; the order of the cached blocks is that of their eviction and is left alone. With prefix caching off
the part without hashes is the whole free list.

For each policy: the runs per transfer that `plan_runs` makes of the pairs of blocks, per 1,000 blocks, since prompts
differ in length (a descriptor each where memory is block-major, one per layer where it is layer-major); and what
sorting costs the scheduler, in whose loop it would run.
"""

import argparse
import heapq
import itertools
import json
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from kvberth.bench.machine import machine, versions
from kvberth.layout import Region, plan_runs

BLOCK_SIZE = 16
OUTPUT_TOKENS = 128
CHUNK_TOKENS = 8192
PREFILL_TOKENS_PER_SECOND = 140_000.0
SECONDS_PER_OUTPUT_TOKEN = 0.007
ADMISSION_TO_FIRST_TOKEN_SECONDS = 0.2
GROWTH_BLOCKS = OUTPUT_TOKENS // BLOCK_SIZE
RATE = 8.0
PROMPT_TOKENS = (1024, 16384)

_PAGE = Region(address=0, block_stride=1, block_length=1)


@dataclass(frozen=True)
class Prompt:
    """One request of the traffic."""

    number: int
    arrival_seconds: float
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE)


@dataclass(frozen=True)
class Life:
    """When a worker takes and gives back blocks for one prompt, in seconds after it was admitted.

    Attributes:
        takes: (when, how many blocks); the first at 0. What is taken for the prompt comes first.
        ends: when all are given back.
    """

    takes: tuple[tuple[float, int], ...]
    ends: float

    @property
    def num_blocks(self) -> int:
        return sum(blocks for _, blocks in self.takes)


@dataclass(frozen=True)
class Policy:
    """When the free blocks without a hash are sorted by id.

    Attributes:
        every_frees: after so many requests have given their blocks back; 0 for never.
        before_blocks: before a request that needs at least so many is admitted; 0 for never.
        limit: sort the first so many only, which are the ones that are used next; 0 for all.
    """

    name: str
    every_frees: int = 0
    before_blocks: int = 0
    limit: int = 0


POLICIES = (
    Policy("as vLLM does"),
    Policy("sorted every 64 frees", every_frees=64),
    Policy("sorted every 8 frees", every_frees=8),
    Policy("sorted before requests of 512 blocks", before_blocks=512),
    Policy("first 2,048 sorted before each request", before_blocks=1, limit=2048),
    Policy("sorted before each request", before_blocks=1),
)


@dataclass
class Outcome:
    """What one worker did.

    Attributes:
        tables: each prompt's blocks, in the order of the prompts; without those taken for the answer.
        sort_seconds: one figure per sort.
        sorted_blocks: how many blocks each sort looked at.
        use: share of the pool in use, on average over time.
    """

    tables: dict[int, list[int]] = field(default_factory=dict)
    sort_seconds: list[float] = field(default_factory=list)
    sorted_blocks: list[int] = field(default_factory=list)
    use: float = 0.0


def make_prompts(count: int, rate: float, lengths: tuple[int, int], seed: int) -> list[Prompt]:
    """Poisson arrivals, lengths uniform between two numbers of tokens."""
    source = random.Random(seed)  # noqa: S311 - no secret
    arrivals = itertools.accumulate(source.expovariate(rate) for _ in range(count))
    return [Prompt(number, arrival, source.randint(*lengths)) for number, arrival in enumerate(arrivals)]


def decode_life(prompt: Prompt, source: random.Random) -> Life:
    """All of the prompt at once, then a block for each 16 tokens of the answer. Steps differ by up to a fifth."""
    token_seconds = SECONDS_PER_OUTPUT_TOKEN * source.uniform(0.8, 1.2)
    growth = [
        (ADMISSION_TO_FIRST_TOKEN_SECONDS + number * BLOCK_SIZE * token_seconds, 1) for number in range(GROWTH_BLOCKS)
    ]
    ends = ADMISSION_TO_FIRST_TOKEN_SECONDS + OUTPUT_TOKENS * token_seconds
    return Life(((0.0, prompt.num_blocks), *growth), ends)


def prefill_life(prompt: Prompt, source: random.Random) -> Life:
    """The prompt by chunks; then the blocks wait for their decode worker, most often for a short time.

    The wait is such that a prompt lives as long here as on the decode worker on average, so that pools of one size
    are equally full.
    """
    chunk_blocks = CHUNK_TOKENS // BLOCK_SIZE
    takes = [
        (first * BLOCK_SIZE / PREFILL_TOKENS_PER_SECOND, min(chunk_blocks, prompt.num_blocks - first))
        for first in range(0, prompt.num_blocks, chunk_blocks)
    ]
    prefill = prompt.num_tokens / PREFILL_TOKENS_PER_SECOND
    mean_wait = ADMISSION_TO_FIRST_TOKEN_SECONDS + OUTPUT_TOKENS * SECONDS_PER_OUTPUT_TOKEN - prefill
    return Life(tuple(takes), prefill + source.expovariate(1 / mean_wait))


def pool_size(prompts: Sequence[Prompt], use: float, rate: float) -> int:
    """Blocks of a pool of which this traffic uses the given share on average, by Little's law."""
    mean_blocks = statistics.fmean(prompt.num_blocks for prompt in prompts) + GROWTH_BLOCKS / 2
    seconds = ADMISSION_TO_FIRST_TOKEN_SECONDS + OUTPUT_TOKENS * SECONDS_PER_OUTPUT_TOKEN
    return round(rate * seconds * mean_blocks / use)


def sort_unhashed(pool: Any, limit: int = 0) -> int:
    """Put the free blocks without a hash, which lie at the head of the free list, in order of their ids.

    Args:
        limit: leave those after the first so many as they are; 0 for none.

    Returns:
        How many were sorted.
    """
    queue = pool.free_block_queue
    count = min(limit, queue.num_free_blocks) if limit else queue.num_free_blocks
    if pool.enable_caching:
        first = itertools.islice(queue.iter_blocks_after(None), count)
        count = sum(1 for _ in itertools.takewhile(lambda block: block.block_hash is None, first))
    blocks = queue.popleft_n(count)
    blocks.sort(key=_block_id)
    queue.prepend_n(blocks)
    return count


def _block_id(block: Any) -> int:
    return int(block.block_id)


class Worker:
    """The blocks of one engine under traffic. Nobody is preempted: admission leaves room for what the live will take.

    Args:
        pool: vLLM's `BlockPool`.
    """

    def __init__(self, pool: Any, policy: Policy) -> None:
        self._pool = pool
        self._policy = policy
        self._promised = 0
        self._frees = 0
        self._waiting: deque[tuple[Prompt, Life]] = deque()
        self._held: dict[int, list[Any]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome()

    def run(self, lives: Sequence[tuple[Prompt, Life]]) -> Outcome:
        """All prompts from their arrival to their end."""
        for prompt, life in lives:
            self._at(prompt.arrival_seconds, lambda now, one=(prompt, life): self._arrive(*one, now))
        last_arrival = lives[-1][0].arrival_seconds
        clock, weighted = 0.0, 0.0
        while self._events:
            now, _, do = heapq.heappop(self._events)
            if now <= last_arrival:
                weighted += (now - clock) * self._pool.get_usage()
                clock = now
            do(now)
        self.outcome.use = weighted / clock
        return self.outcome

    def _at(self, when: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def _arrive(self, prompt: Prompt, life: Life, now: float) -> None:
        self._waiting.append((prompt, life))
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self._waiting:
            prompt, life = self._waiting[0]
            if self._pool.get_num_free_blocks() < self._promised + life.num_blocks:
                return
            self._waiting.popleft()
            if 0 < self._policy.before_blocks <= prompt.num_blocks:
                self._sort()
            self._held[prompt.number] = []
            self._promised += life.num_blocks
            for after, blocks in life.takes:
                if after == 0.0:
                    self._take(prompt, blocks)
                else:
                    self._at(now + after, lambda _, blocks=blocks, prompt=prompt: self._take(prompt, blocks))
            self._at(now + life.ends, lambda when, prompt=prompt: self._free(prompt, when))

    def _take(self, prompt: Prompt, blocks: int) -> None:
        self._promised -= blocks
        self._held[prompt.number] += self._pool.get_new_blocks(blocks)

    def _free(self, prompt: Prompt, now: float) -> None:
        held = self._held.pop(prompt.number)
        self.outcome.tables[prompt.number] = [block.block_id for block in held[: prompt.num_blocks]]
        if self._pool.enable_caching:
            full = min(len(held), (prompt.num_tokens + OUTPUT_TOKENS - 1) // BLOCK_SIZE)
            request = SimpleNamespace(block_hashes=[os.urandom(32) for _ in range(full)])
            self._pool.cache_full_blocks(request, held, 0, full, BLOCK_SIZE, 0)
        self._pool.free_blocks(reversed(held))
        self._frees += 1
        if self._policy.every_frees and self._frees % self._policy.every_frees == 0:
            self._sort()
        self._admit(now)

    def _sort(self) -> None:
        began = time.perf_counter()
        count = sort_unhashed(self._pool, self._policy.limit)
        self.outcome.sort_seconds.append(time.perf_counter() - began)
        self.outcome.sorted_blocks.append(count)


@dataclass
class Pair:
    """A prefill and a decode worker after the same traffic."""

    prompts: list[Prompt]
    prefill: Outcome
    decode: Outcome

    def transfers(self, warm_up: int) -> Iterator[tuple[list[int], list[int]]]:
        """(P's blocks, D's blocks) of every prompt after the first ones."""
        for prompt in self.prompts[warm_up:]:
            yield self.prefill.tables[prompt.number], self.decode.tables[prompt.number]


def simulate(
    *,
    use: float,
    caching: bool,
    policy: Policy,
    seed: int,
    prompts: int,
    rate: float = RATE,
    lengths: tuple[int, int] = PROMPT_TOKENS,
) -> Pair:
    """The same prompts through a prefill and a decode worker with pools of one size.

    Args:
        use: share of the pool that the traffic uses on average; sets the pool's size.
    """
    # vLLM takes seconds to import, and those who only read the pure parts of this module need it not.
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415

    traffic = make_prompts(prompts, rate, lengths, seed)
    size = 1 + pool_size(traffic, use, rate)  # vLLM keeps one for itself
    source = random.Random(seed + 1)  # noqa: S311 - no secret
    outcomes = []
    for life in (prefill_life, decode_life):
        lives = [(prompt, life(prompt, source)) for prompt in traffic]
        outcomes.append(Worker(BlockPool(size, caching, BLOCK_SIZE), policy).run(lives))
    return Pair(traffic, *outcomes)


def vllm_version() -> str:
    """Of the vLLM whose free list this is."""
    from vllm import __version__  # noqa: PLC0415 - takes seconds to import

    return str(__version__)


def runs_of(prefill_blocks: Sequence[int], decode_blocks: Sequence[int]) -> int:
    """Pieces of a transfer in which blocks are neighbours on both sides."""
    return plan_runs([_PAGE], [_PAGE], prefill_blocks, decode_blocks).num_runs


def runs_per_thousand(pair: Pair, warm_up: int) -> list[float]:
    """One figure per transfer."""
    return [1000 * runs_of(ours, theirs) / len(ours) for ours, theirs in pair.transfers(warm_up)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new JSON file for the raw records")
    parser.add_argument("--uses", nargs="+", type=float, default=[0.5, 0.7, 0.9], help="shares of the pool in use")
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second; the pools grow with it")
    parser.add_argument("--tokens", nargs=2, type=int, default=PROMPT_TOKENS, help="shortest and longest prompt")
    parser.add_argument("--prompts", type=int, default=4000, help="per case; the last quarter is measured")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.out and arguments.out.exists():
        raise SystemExit(f"{arguments.out} is there already")
    cases = []
    for caching, use in itertools.product((False, True), arguments.uses):
        for policy in (POLICIES[0], POLICIES[-1]) if caching else POLICIES:
            pair = simulate(
                use=use,
                caching=caching,
                policy=policy,
                seed=arguments.seed,
                prompts=arguments.prompts,
                rate=arguments.rate,
                lengths=tuple(arguments.tokens),
            )
            cases.append(describe(pair, policy, caching, use, arguments.prompts * 3 // 4))
    show(cases)
    if arguments.out:
        settings = {key: value for key, value in vars(arguments).items() if key != "out"}
        record = {
            "settings": settings,
            "machine": machine(),
            "versions": versions() | {"vllm": vllm_version()},
            "cases": cases,
        }
        arguments.out.write_text(json.dumps(record, indent=1))


def describe(pair: Pair, policy: Policy, caching: bool, use: float, warm_up: int) -> dict[str, Any]:
    """The raw record of one case."""
    sides = {"prefill": pair.prefill, "decode": pair.decode}
    return {
        "policy": policy.name,
        "prefix_caching": caching,
        "target_use": use,
        "runs_per_1000_blocks": runs_per_thousand(pair, warm_up),
        "blocks": [len(ours) for ours, _ in pair.transfers(warm_up)],
        "requests": len(pair.prompts),
        "use": {name: side.use for name, side in sides.items()},
        "sort_ms": {name: [1e3 * each for each in side.sort_seconds] for name, side in sides.items()},
        "sorted_blocks": {name: side.sorted_blocks for name, side in sides.items()},
    }


def show(cases: list[dict[str, Any]]) -> None:
    table = Table(
        "prefix caching",
        "pool in use, P and D",
        "policy",
        "runs per 1,000 blocks, median (p10 to p90)",
        "ms per sort, median",
        "blocks sorted",
        "sorts per request",
    )
    for case in cases:
        runs = statistics.quantiles(case["runs_per_1000_blocks"], n=10)
        times = case["sort_ms"]["prefill"] + case["sort_ms"]["decode"]
        counts = case["sorted_blocks"]["prefill"] + case["sorted_blocks"]["decode"]
        table.add_row(
            "on" if case["prefix_caching"] else "off",
            " ".join(f"{share:.0%}" for share in case["use"].values()),
            case["policy"],
            f"{statistics.median(case['runs_per_1000_blocks']):.0f} ({runs[0]:.0f} to {runs[-1]:.0f})",
            f"{statistics.median(times):.2f}" if times else "",
            f"{statistics.median(counts):,.0f}" if counts else "",
            f"{len(times) / 2 / case['requests']:.2f}" if times else "",
        )
    Console(width=max(150, Console().width)).print(table)


if __name__ == "__main__":
    main()
