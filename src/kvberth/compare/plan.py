"""Which cells are measured on which cluster, in which order, and what of it is still to do. Pure.

```
repetition 0    group grid:  push [cells]  push-whole [cells]  pull [cells]  ...      one fresh cluster per [cells]
                group prefix-caching:  ...
repetition 1    the same, the modes rotated, so that a machine that drifts hurts all alike
```
Two clusters at once would fight for the machine, and memory does not hold all of them stopped; so what is interleaved
are whole clusters, and ratios are taken within a repetition.
"""

import hashlib
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum

import msgspec

from kvberth.compare.modes import Mode, is_divided
from kvberth.compare.settings import CompareSettings

__all__ = ["Cell", "Group", "Memory", "Run", "cell_key", "groups", "planned_seconds", "remaining", "runs"]

_START_SECONDS = 35.0
"""Of a local cluster, roughly; corrected while it runs."""
_DRAIN_SECONDS = 4.0
_EXTRA_RATE = 2.0
_EXTRA_REQUESTS = 12
"""Of 16k tokens: fewer than the emulated profile's cache holds at once, so that they all find fresh memory."""
_CHUNK_TOKENS = 4096
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
        shared_tokens: of each prompt, the part at its beginning that the decode worker's prefix cache has.
    """

    group: str
    rate: float
    prompt_tokens: int
    requests: int
    output_tokens: int
    memory: Memory = Memory.STEADY
    shared_tokens: int = 0

    @property
    def name(self) -> str:
        """Part of a file's name: unique within its group."""
        name = f"{self.prompt_tokens}@{self.rate:g}"
        if self.memory is not Memory.STEADY:
            name += f"-{self.memory}"
        return f"{name}-hit" if self.shared_tokens else name

    @property
    def title(self) -> str:
        """For people."""
        title = f"{tokens(self.prompt_tokens)} at {self.rate:g}/s"
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


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Cells that one cluster can measure one after another."""

    name: str
    title: str
    modes: tuple[str, ...]
    cells: tuple[Cell, ...]
    prefix_caching: bool = False
    engine_args: tuple[str, ...] = ()


class Run(msgspec.Struct, frozen=True):
    """One cluster's turn."""

    repetition: int
    group: Group
    mode: str

    def key(self, cell: Cell) -> str:
        """Names the records of one cell of this run."""
        return cell_key(self.repetition, self.group.name, self.mode, cell.name)


def cell_key(repetition: int, group: str, mode: str, cell_name: str) -> str:
    """The name of a file of records, without its ending."""
    return f"r{repetition}-{group}-{mode}-{cell_name}"


def groups(settings: CompareSettings) -> tuple[Group, ...]:
    """The grid, and with `extra` what belongs to its published form."""
    modes = tuple(settings.attach) if settings.attach else settings.modes
    grid = Group(
        name="grid",
        title="Rate by prompt length, without prefix caching",
        modes=modes,
        cells=tuple(
            _cell(settings, "grid", rate, prompt)
            for prompt in sorted(settings.prompts)
            for rate in sorted(settings.rates)
        ),
    )
    return (grid, *_extra_groups(settings)) if settings.extra else (grid,)


def _extra_groups(settings: CompareSettings) -> tuple[Group, ...]:
    """All with the longest prompts of the grid."""
    divided = tuple(mode for mode in settings.modes if is_divided(mode))
    caching, chunks, alone = "prefix-caching", "chunks-4096", "decode-only"
    prompt, rate = max(settings.prompts), max(settings.rates)
    hits = {False: 0, True: prompt * 7 // 8 // _BLOCK_TOKENS * _BLOCK_TOKENS}
    return (
        Group(
            name=caching,
            title=f"Prefix caching on, prompts of {tokens(prompt)}: fresh and fragmented memory, with and without 7/8 "
            "of the prompt in the caches",
            modes=divided,
            prefix_caching=True,
            cells=tuple(
                Cell(
                    group=caching,
                    rate=_EXTRA_RATE,
                    prompt_tokens=prompt,
                    requests=_EXTRA_REQUESTS,
                    output_tokens=settings.output_tokens,
                    memory=memory,
                    shared_tokens=hits[hit],
                )
                for memory in (Memory.FRESH, Memory.FRAGMENTED)
                for hit in (False, True)
            ),
        ),
        Group(
            name=chunks,
            title="Prefill in chunks of 4,096 tokens",
            modes=divided,
            engine_args=("--max-num-batched-tokens", str(_CHUNK_TOKENS)),
            cells=(_cell(settings, chunks, rate, prompt),),
        ),
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
    )


def _cell(settings: CompareSettings, group: str, rate: float, prompt_tokens: int) -> Cell:
    return Cell(
        group=group,
        rate=rate,
        prompt_tokens=prompt_tokens,
        requests=max(settings.least_requests, round(rate * settings.seconds)),
        output_tokens=settings.output_tokens,
    )


def runs(settings: CompareSettings) -> tuple[Run, ...]:
    """All clusters' turns, in order."""
    return tuple(
        Run(repetition, group, mode)
        for repetition in range(settings.repetitions)
        for group in groups(settings)
        for mode in _rotated(group.modes, repetition, settings.repetitions)
    )


def _rotated(modes: Sequence[str], repetition: int, repetitions: int) -> Iterable[str]:
    """Over all repetitions each mode begins as early and as late as the others, as nearly as their numbers allow."""
    first = repetition * len(modes) // repetitions
    return (*modes[first:], *modes[:first])


def remaining(run: Run, done: AbstractSet[str]) -> tuple[Cell, ...]:
    """The cells of `run` that are still to be measured, given the keys of those that have been.

    Cells whose memory is fresh or fragmented depend on what came before: if one of them lacks, all are measured again.
    """
    lacking = tuple(cell for cell in run.group.cells if run.key(cell) not in done)
    depends = any(cell.memory is not Memory.STEADY for cell in lacking)
    return run.group.cells if depends else lacking


def planned_seconds(run: Run, cells: Sequence[Cell], *, starts_cluster: bool = True) -> float:
    """About how long it takes to measure `cells`; 0 for none."""
    sending = sum(cell.requests / cell.rate + _DRAIN_SECONDS for cell in cells)
    return sending + (_START_SECONDS if starts_cluster else 0.0) if cells else 0.0
