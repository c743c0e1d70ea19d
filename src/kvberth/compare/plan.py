"""Which cells are measured on which cluster, in which order, and what of it is still to do. Pure.

```
repetition 0    group grid:  push [cells]  push-whole [cells]  pull [cells]  ...      one fresh cluster per [cells]
                group prefix-caching:  ...
repetition 1    the same, the modes rotated, so that a machine that drifts hurts all alike
```
Why whole clusters are interleaved and not cells: two that work at once fight for the cores; all that are compared, kept
idle beside each other, take 3 GB each; and what differs between two starts of the same engines belongs into the
figures. So one cluster lives at a time, each starts once per repetition and measures all its cells in one go, and
ratios are taken within a repetition.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum

import msgspec

from kvberth.bench import Arrivals
from kvberth.compare.modes import Mode, is_divided
from kvberth.compare.settings import CompareSettings, TraceChoice

__all__ = [
    "Cell",
    "Group",
    "Memory",
    "Run",
    "cell_key",
    "groups",
    "load_of",
    "planned_seconds",
    "prompts_of",
    "remaining",
    "runs",
    "tokens",
]

# Seconds on two cores; the time left is corrected by what it has really been so far.
_EMULATED_START_SECONDS, _START_SECONDS = 8.0, 60.0
"""Start and end of a local cluster, and its first requests."""
_DRAIN_SECONDS = 2.5
"""Behind the last sending of a cell: its answer, and the reading of counters."""
_FRAGMENTING_SECONDS = 12.0
_WARMUP_RATE = 8.0
_EXTRA_RATE = 2.0
_EXTRA_REQUESTS = 12
"""Of 16k tokens: fewer than the emulated profile's cache holds at once, so that they all find fresh memory."""
_CHUNK_TOKENS = 4096
_CHUNKED = (Mode.PUSH, Mode.VLLM_PULL, Mode.VLLM_PUSH)
_INLINE = {Mode.VLLM_PULL_INLINE: Mode.VLLM_PULL, Mode.VLLM_PUSH_INLINE: Mode.VLLM_PUSH}
"""Other ways of posting, and the modes beside which they are shown."""
_BLOCK_TOKENS = 16
"""Prefix caches hold whole blocks."""


class Memory(StrEnum):
    """The free KV blocks when a cell begins."""

    STEADY = "steady"
    """As the cells before have left it."""
    FRESH = "fresh"
    """Never used: prompts get neighbouring blocks."""
    FRAGMENTED = "fragmented"
    """After prompts of mixed lengths have filled and left it more than once."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the grid.

    Attributes:
        group: the name of its group.
        rate: requests per second; on average, for a trace at its own times.
        prompt_tokens: 0 for a trace, whose prompts have many lengths.
        output_tokens: 0 for those of a trace.
        shared_tokens: of each prompt, the part at its beginning that the decode worker's prefix cache has.
        speed: of a trace at its own times, how much faster than it was recorded.
    """

    group: str
    rate: float
    prompt_tokens: int
    requests: int
    output_tokens: int
    memory: Memory = Memory.STEADY
    shared_tokens: int = 0
    speed: float | None = None

    @property
    def name(self) -> str:
        """Part of a file's name: unique within its group."""
        name = f"{self.prompt_tokens or 'trace'}@{self.rate:g}"
        if self.memory is not Memory.STEADY:
            name += f"-{self.memory}"
        return f"{name}-hit" if self.shared_tokens else name

    @property
    def title(self) -> str:
        """For people."""
        title = f"{tokens(self.prompt_tokens) if self.prompt_tokens else 'trace'} at {self.rate:g}/s"
        if self.memory is not Memory.STEADY:
            title += f", {self.memory} memory"
        return f"{title}, prefix hit" if self.shared_tokens else title

    def traffic_seed(self, seed: int, repetition: int) -> int:
        """The same for all modes; another one for each cell and repetition."""
        text = f"{seed}/{repetition}/{self.prompt_tokens}@{self.rate:g}/{self.memory}/{self.shared_tokens > 0}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def tokens(count: int) -> str:
    """A number of tokens as people say it: 16k."""
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def prompts_of(prompt_tokens: int) -> str:
    """The prompts of a cell, for people; 0 are those of a trace."""
    return f"{tokens(prompt_tokens)} prompts" if prompt_tokens else "the trace's prompts"


def load_of(rate: float, prompt_tokens: int) -> tuple[float, float]:
    """What puts cells in the order of their load: tokens per second, and then the longer prompts."""
    return rate * max(1, prompt_tokens), prompt_tokens


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Cells that one cluster can measure one after another.

    Attributes:
        partly: modes that are measured in some of the cells only, with these cells' names.
        starts_per_cell: each cell has a cluster of its own, since prefix caches would know it from the one before.
    """

    name: str
    title: str
    modes: tuple[str, ...]
    cells: tuple[Cell, ...]
    partly: Mapping[str, tuple[str, ...]] = {}
    starts_per_cell: bool = False
    prefix_caching: bool = False
    engine_args: tuple[str, ...] = ()

    def cells_of(self, mode: str) -> tuple[Cell, ...]:
        """Those in which `mode` is measured."""
        names = self.partly.get(mode)
        return self.cells if names is None else tuple(cell for cell in self.cells if cell.name in names)


class Run(msgspec.Struct, frozen=True):
    """One cluster's turn."""

    repetition: int
    group: Group
    mode: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """Of the folder with its logs."""
        cell = f"-{self.cells[0].name}" if self.group.starts_per_cell else ""
        return f"r{self.repetition}-{self.group.name}-{self.mode}{cell}"

    def key(self, cell: Cell) -> str:
        """Names the records of one cell of this run."""
        return cell_key(self.repetition, self.group.name, self.mode, cell.name)


def cell_key(repetition: int, group: str, mode: str, cell_name: str) -> str:
    """The name of a file of records, without its ending."""
    return f"r{repetition}-{group}-{mode}-{cell_name}"


def groups(settings: CompareSettings) -> tuple[Group, ...]:
    """The grid, or the trace in its place; with `extra` what belongs to the published form."""
    modes = tuple(settings.attach) if settings.attach else settings.modes
    if settings.trace is not None:
        return (_trace_group(settings, settings.trace, modes),)
    grid = Group(
        name="grid",
        title="Rate by prompt length",
        modes=modes,
        prefix_caching=settings.has_prefix_caching,
        cells=tuple(
            _cell(settings, "grid", rate, prompt)
            for prompt in sorted(settings.prompts)
            for rate in sorted(settings.rates)
        ),
    )
    return _published_groups(settings, grid) if settings.extra else (grid,)


def _trace_group(settings: CompareSettings, trace: TraceChoice, modes: tuple[str, ...]) -> Group:
    """Named as the grid is: it stands in its place."""
    paces: list[tuple[float, float | None]] = [(rate, None) for rate in sorted(settings.rates)]
    if settings.arrivals == Arrivals.TRACE and trace.rate is not None:
        paces = [(float(f"{trace.rate * speed:.3g}"), speed) for speed in sorted(trace.speeds)]
    return Group(
        name="grid",
        title=f"The trace {trace.name}",
        modes=modes,
        starts_per_cell=not settings.attach,
        prefix_caching=settings.has_prefix_caching,
        cells=tuple(
            Cell(
                group="grid",
                rate=rate,
                prompt_tokens=0,
                requests=trace.requests,
                output_tokens=settings.output_tokens or 0,
                speed=speed,
            )
            for rate, speed in paces
        ),
    )


def _published_groups(settings: CompareSettings, grid: Group) -> tuple[Group, ...]:
    """What is beside the grid has its longest prompts, and of the modes those whose figures are told from it.

    Inline posting is measured where the load is highest: at the others a post is short beside the time between two.
    """
    prompt, rate = max(settings.prompts), max(settings.rates)
    divided = tuple(mode for mode in settings.modes if is_divided(mode))
    streamed = tuple(mode for mode in divided if mode != Mode.PUSH_WHOLE)
    inline = tuple(mode for mode in _INLINE if _INLINE[mode] in divided and mode not in divided)
    heavy = tuple(_cell(settings, "grid", each, prompt).name for each in sorted(settings.rates)[-2:])
    caching, chunks, alone = "prefix-caching", "chunks-4096", "decode-only"
    hits = {False: 0, True: prompt * 7 // 8 // _BLOCK_TOKENS * _BLOCK_TOKENS}
    return (
        msgspec.structs.replace(grid, modes=(*grid.modes, *inline), partly=dict.fromkeys(inline, heavy)),
        Group(
            name=alone,
            title="The decode load of the heaviest cell, without transfers",
            modes=(Mode.DECODE_ONLY,),
            prefix_caching=True,
            cells=(
                msgspec.structs.replace(
                    _cell(settings, alone, rate, prompt), shared_tokens=(prompt - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
                ),
            ),
        ),
        Group(
            name=chunks,
            title="Prefill in chunks of 4,096 tokens",
            modes=tuple(mode for mode in divided if mode in _CHUNKED),
            engine_args=("--max-num-batched-tokens", str(_CHUNK_TOKENS)),
            cells=(_cell(settings, chunks, rate, prompt),),
        ),
        Group(
            name=caching,
            title=f"Prefix caching on, prompts of {tokens(prompt)}: fresh and fragmented memory, with and without 7/8 "
            "of the prompt in the caches",
            modes=streamed,
            prefix_caching=True,
            cells=tuple(
                Cell(
                    group=caching,
                    rate=_EXTRA_RATE,
                    prompt_tokens=prompt,
                    requests=_EXTRA_REQUESTS,
                    output_tokens=settings.output_tokens or 0,
                    memory=memory,
                    shared_tokens=hits[hit],
                )
                for memory in (Memory.FRESH, Memory.FRAGMENTED)
                for hit in (False, True)
            ),
        ),
    )


def _cell(settings: CompareSettings, group: str, rate: float, prompt_tokens: int) -> Cell:
    return Cell(
        group=group,
        rate=rate,
        prompt_tokens=prompt_tokens,
        requests=max(settings.least_requests, round(rate * settings.seconds)),
        output_tokens=settings.output_tokens or 0,
    )


def runs(settings: CompareSettings) -> tuple[Run, ...]:
    """All clusters' turns, in order."""
    return tuple(
        Run(repetition, group, mode, cells)
        for repetition in range(settings.repetitions)
        for group in groups(settings)
        for mode in _rotated(group.modes, repetition, settings.repetitions)
        for cells in _turns(group, mode)
    )


def _turns(group: Group, mode: str) -> Iterable[tuple[Cell, ...]]:
    """The cells of each cluster of `mode`."""
    cells = group.cells_of(mode)
    return [(cell,) for cell in cells] if group.starts_per_cell else [cells]


def _rotated(modes: Sequence[str], repetition: int, repetitions: int) -> Iterable[str]:
    """Over all repetitions each mode begins as early and as late as the others, as nearly as their numbers allow."""
    first = repetition * len(modes) // repetitions
    return (*modes[first:], *modes[:first])


def remaining(run: Run, done: AbstractSet[str]) -> tuple[Cell, ...]:
    """The cells of `run` that are still to be measured, given the keys of those that have been.

    Cells whose memory is fresh or fragmented depend on what came before: if one of them lacks, all are measured again.
    """
    lacking = tuple(cell for cell in run.cells if run.key(cell) not in done)
    depends = any(cell.memory is not Memory.STEADY for cell in lacking)
    return run.cells if depends else lacking


def planned_seconds(settings: CompareSettings, run: Run, cells: Sequence[Cell], *, has_started: bool = False) -> float:
    """About how long it takes to measure `cells`, with the start of their cluster; 0 for none."""
    if not cells:
        return 0.0
    seconds = sum(cell.requests / cell.rate + _DRAIN_SECONDS for cell in cells)
    if any(cell.memory is Memory.FRAGMENTED for cell in cells):
        seconds += _FRAGMENTING_SECONDS
    elif not any(cell.memory is Memory.FRESH for cell in cells):
        seconds += settings.warmup_requests / _WARMUP_RATE + _DRAIN_SECONDS
    if has_started or settings.attach:
        return seconds
    return seconds + (_EMULATED_START_SECONDS if settings.emulate else _START_SECONDS)
