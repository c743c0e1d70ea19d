"""Traffic from a trace: its times, lengths and shared beginnings, with tokens drawn for what was not recorded."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvberth.bench.arrivals import Arrivals, arrival_seconds
from kvberth.bench.plan import Message, Plan, PlannedRequest, TokenIds
from kvberth.bench.traces import BLOCK_TOKENS, GivenTokens, HashedBlocks, RandomTokens, Trace, TraceRow, Turn
from kvberth.bench.traffic import Traffic, random_token_ids

__all__ = ["TraceTraffic"]

# Outside of these bounds a trace's times are in another unit than its format's: the busiest published trace has fewer
# than 100 requests per second, and the slowest one every few seconds. Few rows do not tell.
_MOST_PER_SECOND = 1000.0
_LONGEST_MEAN_GAP_SECONDS = 600.0
_FEWEST_TELLING_ROWS = 10

_WARMUP_CHAT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTraffic(Traffic):
    """The rows of a trace, as they came or at another pace.

    A prompt of which only the length is known is random token ids of that length. Where a trace has hash ids, equal
    ones stand for equal blocks of tokens, so that prefix caches find in the replay what they found in the original.

    Attributes:
        trace: what `read_trace` has read.
        requests: at most so many, the first of the trace.
        arrivals: `TRACE`, the trace's own times; or others, at `rate`.
        speed: how much faster than it was recorded; for `TRACE` only.
        output_tokens: of every answer; None takes the trace's.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    trace: Trace
    arrivals: Arrivals = Arrivals.TRACE
    speed: float = 1.0
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        Traffic.__post_init__(self)  # a class with slots has no super() without arguments
        if self.arrivals not in set(Arrivals):
            raise ValueError(f"arrivals: must be {' or '.join(Arrivals)}, not {self.arrivals}")
        if not 0 < self.speed < math.inf:
            raise ValueError(f"speed: must be above 0 and finite, not {self.speed}")
        if self.output_tokens is not None:
            self._at_least(output_tokens=1)
        elif silent := [row.line for row in self.trace.rows if any(turn.output_tokens is None for turn in row.turns)]:
            raise ValueError(f"output_tokens: must be given, since {self.trace.path}:{silent[0]} does not say")
        if self.arrivals == Arrivals.TRACE:
            self._check_times()
        elif self.speed != 1.0:
            raise ValueError(f"speed: is for arrivals trace; for {self.arrivals} set rate")

    def plan(self) -> Plan:
        """Draw what was not recorded. The same settings give the same plan."""
        arrivals_seed, prompts_seed, blocks_seed, warmup_seed, cancel_seed = np.random.SeedSequence(self.seed).spawn(5)
        rows = self._rows()
        turns = [turn for row in rows for turn in row.turns]
        output_tokens = [self.output_tokens or turn.output_tokens or 0 for turn in turns]
        cancellations = self._cancellations(cancel_seed, output_tokens)
        requests: list[PlannedRequest] = []
        prompts_seeds = iter(prompts_seed.spawn(len(turns)))
        for row, arrival in zip(rows, self._arrival_seconds(rows, len(turns), arrivals_seed), strict=True):
            for place, turn in enumerate(row.turns):
                ids, messages = self._prompt(turn, next(prompts_seeds), blocks_seed)
                index = len(requests)
                requests.append(
                    PlannedRequest(
                        index,
                        arrival,
                        ids,
                        output_tokens[index],
                        messages=messages,
                        follows=index - 1 if place else None,
                        cancellation=cancellations[index],
                    )
                )
        return Plan(tuple(requests), tuple(self._warmup(requests, warmup_seed)))

    def settings(self) -> dict[str, Any]:
        """The trace by its name and what was read of it."""
        rows = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "trace"}
        return rows | {
            "trace": {
                "file": self.trace.path.name,
                "format": self.trace.format,
                "lines": [self.trace.rows[0].line, self.trace.rows[-1].line],
                "skipped": [dataclasses.asdict(row) for row in self.trace.skipped],
            }
        }

    def _rows(self) -> list[TraceRow]:
        """As many as are wanted, in the order of their times; rows of one time stay as they are."""
        rows: list[TraceRow] = []
        missing = self.requests
        for row in self.trace.rows:
            if missing <= 0:
                break
            rows.append(dataclasses.replace(row, turns=row.turns[:missing]))
            missing -= len(rows[-1].turns)
        return sorted(rows, key=lambda row: row.seconds or 0.0) if self.arrivals == Arrivals.TRACE else rows

    def _arrival_seconds(self, rows: list[TraceRow], requests: int, seed: np.random.SeedSequence) -> list[float]:
        if self.arrivals == Arrivals.TRACE:
            times = [row.seconds or 0.0 for row in rows]
            return [(time - times[0]) / self.speed for time in times]
        return arrival_seconds(self.arrivals, self.rate * len(rows) / requests, len(rows), seed)

    def _check_times(self) -> None:
        """A trace in another unit would be another traffic altogether."""
        trace = self.trace
        if trace.time_unit is None:
            raise ValueError(f"arrivals: {trace.path} has no times; take poisson or uniform")
        times = [row.seconds or 0.0 for row in self._rows()]
        span_seconds = (times[-1] - times[0]) / self.speed
        gaps = len(times) - 1
        if len(times) < _FEWEST_TELLING_ROWS or not span_seconds:
            return
        unit = f"its times must be {trace.time_unit}; if they are, set speed"
        if gaps / span_seconds > _MOST_PER_SECOND:
            raise ValueError(f"trace: {trace.path} has {gaps / span_seconds:,.0f} requests per second; {unit}")
        if span_seconds / gaps > _LONGEST_MEAN_GAP_SECONDS:
            raise ValueError(f"trace: {trace.path} has a request every {span_seconds / gaps:,.0f} s; {unit}")

    def _prompt(
        self, turn: Turn, seed: np.random.SeedSequence, blocks_seed: np.random.SeedSequence
    ) -> tuple[TokenIds, tuple[Message, ...]]:
        nothing = np.array([], dtype=np.int32)
        match turn.prompt:
            case RandomTokens(count):
                return random_token_ids(seed, count, self.token_range), ()
            case HashedBlocks(count, hash_ids):
                return self._blocks(count, hash_ids, blocks_seed), ()
            case GivenTokens(token_ids):
                return np.array(token_ids, dtype=np.int32), ()
            case messages:
                return nothing, messages

    def _blocks(self, count: int, hash_ids: tuple[int, ...], seed: np.random.SeedSequence) -> TokenIds:
        """Each block from a seed of its own, so that it is the same in every prompt, every run and every trace."""
        blocks = [
            random_token_ids(
                np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, hash_id)),
                min(BLOCK_TOKENS, count - place * BLOCK_TOKENS),
                self.token_range,
            )
            for place, hash_id in enumerate(hash_ids)
        ]
        ids: TokenIds = np.concatenate(blocks)
        ids.setflags(write=False)
        return ids

    def _warmup(self, requests: list[PlannedRequest], seed: np.random.SeedSequence) -> Iterator[PlannedRequest]:
        """Of the lengths of the first requests, but with other tokens, so that no prefix cache knows the trace."""
        firsts = [each for each in requests if each.follows is None]
        for index, child in enumerate(seed.spawn(self.warmup)):
            like = firsts[index % len(firsts)]
            ids = random_token_ids(child, len(like.prompt_token_ids), self.token_range)
            if like.messages:
                hello = (Message(role="user", content=f"Please count to {100 + index}."),)
                yield PlannedRequest(index, 0.0, ids, min(like.output_tokens, _WARMUP_CHAT_TOKENS), messages=hello)
            else:
                yield PlannedRequest(index, 0.0, ids, like.output_tokens)
