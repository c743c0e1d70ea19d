"""From the records of a folder to the figures of a comparison. Pure.

The schema of `summary.json` is `Summary`, described for readers in docs/compare.md; fields are added, never renamed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvberth.bench import RequestRecord
from kvberth.compare.answers import differing_answers
from kvberth.compare.engine_figures import Breakdown, EngineFigures, engine_figures
from kvberth.compare.gaps import gaps_beside, streams, windows
from kvberth.compare.modes import Mode
from kvberth.compare.plan import Cell
from kvberth.compare.statistics import PERCENTILES, Estimate, Samples, paired_ratio, percentiles
from kvberth.compare.store import MeasuredCell

__all__ = ["CellSummary", "Figures", "Ratio", "Stall", "pooled", "ratios_of", "samples_of", "summarise_cell"]

SCHEMA = 1


class Figures(msgspec.Struct, frozen=True):
    """Medians over repetitions of a percentile, and their intervals (low, high).

    p95 and p99 are None where a repetition had too few requests to tell them; see `statistics`.
    """

    p50: float
    p95: float | None
    p99: float | None
    p50_interval: tuple[float, float]
    p95_interval: tuple[float, float] | None
    p99_interval: tuple[float, float] | None


class Gaps(msgspec.Struct, frozen=True):
    """Medians over repetitions of percentiles of all gaps between chunks.

    They have no intervals: the gaps of one request, and those of its neighbours, are not independent of each other.
    """

    p50: float
    p95: float
    p99: float


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The longest gap between tokens beside somebody else's transfer.

    Attributes:
        transfers: those beside which another request was being answered.
        step_ms: the median TPOT of the cell: a decode step.
        transfer_ms: how long a transfer was taken to keep the decode worker; where there are none, the mean time to
            first token, in which the worker takes the request in.
        p50_ms, p99_ms: of the gaps.
        p99_steps: how much longer than a step the p99 is, in steps.
    """

    transfers: int
    step_ms: float
    transfer_ms: float
    p50_ms: float
    p99_ms: float
    p99_steps: float


class CellSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of one mode, over all its repetitions. None is what cannot be known of this mode.

    Attributes:
        cell: its name within its group.
        prompt_tokens: that were planned; 0 for a trace.
        output_tokens: planned, or the mean of a trace's.
        mean_prompt_tokens: as the server counted them.
        prefix_hit: the share of each prompt that was put into the caches before, from 0 to 1.
        cached_share: of the prompts' tokens, what the prefix caches of those engines had that read prompts; None where
            they have none.
        repetitions: that were measured to their end.
        cancelled: requests whose client went away, as was planned; they are in no figure of time.
        corruptions: KV contexts that held wrong words; emulated engines only.
        transfers, transfers_failed: that completed, and that did not. With fewer completed than answers, a decode
            worker has computed prompts itself.
        answers_differing: answers that are not those of the other modes to the same request.
        handoff_ms: from the end of the prefill to the first token, as the router heard of both; see `journal`.
        beyond_prefill_ms: mean time to first token, less the mean queue and prefill.
        descriptors_per_transfer, bytes_per_transfer, post_ms, transfer_ms: means.
        reserved_block_seconds: per request.
        requests_per_second: that succeeded, over the time it took; the median over repetitions.
        cost_per_request, cost_per_million_tokens: in the currency of the price; tokens of prompt and answer.
        emulator_late_share: see `EngineFigures`.
    """

    mode: str
    group: str
    cell: str
    rate: float
    prompt_tokens: int
    output_tokens: int
    mean_prompt_tokens: float
    memory: str
    prefix_hit: float
    cached_share: float | None
    repetitions: int
    requests: int
    failed: int
    failures: dict[str, int]
    cancelled: int
    corruptions: int | None
    answers_differing: int
    preemptions: int | None
    transfers: int | None
    transfers_failed: int | None
    ttft_ms: Figures | None
    tpot_ms: Figures | None
    itl_ms: Gaps | None
    e2e_ms: Figures | None
    handoff_ms: Figures | None
    beyond_prefill_ms: float | None
    breakdown_ms: Breakdown | None
    stall: Stall | None
    descriptors_per_transfer: float | None
    bytes_per_transfer: float | None
    post_ms: float | None
    transfer_ms: float | None
    reserved_block_seconds: float | None
    requests_per_second: float
    output_tokens_per_second: float
    cost_per_request: float | None
    cost_per_million_tokens: float | None
    idle_share: float | None
    emulator_late_share: float | None
    warnings: list[str]

    @property
    def has_lost_transfers(self) -> bool:
        """Whether answers were given without the handoff that was to be measured."""
        return self.transfers is not None and self.transfers < self.requests - self.failed - self.cancelled


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A mode's figure over another's, in one cell."""

    mode: str
    baseline: str
    group: str
    cell: str
    metric: str
    percentile: int
    value: float
    low: float
    high: float

    @property
    def is_difference(self) -> bool:
        """Whether it is more than chance and more than the 3% that nobody would notice."""
        return not self.low <= 1 <= self.high and abs(self.value - 1) > 0.03


def pooled(measured: Iterable[MeasuredCell]) -> dict[tuple[str, str, str], list[MeasuredCell]]:
    """The repetitions of each (group, cell, mode), in order."""
    found: dict[tuple[str, str, str], list[MeasuredCell]] = defaultdict(list)
    for each in sorted(measured, key=lambda each: each.repetition):
        found[each.cell.group, each.cell.name, each.mode].append(each)
    return dict(found)


def summarise_cell(
    repetitions: Sequence[MeasuredCell],
    others: Sequence[MeasuredCell],
    *,
    price_per_gpu_hour: float | None = None,
    gpus_per_engine: int = 1,
) -> CellSummary:
    """The figures of one mode in one cell.

    Args:
        repetitions: of this mode.
        others: the same cell in all modes; answers are compared with theirs.
    """
    cell, mode = repetitions[0].cell, repetitions[0].mode
    records = [record for each in repetitions for record in each.records]
    engines = engine_figures(repetitions)
    prompt, answer = (_mean_tokens(records, name) for name in ("prompt_tokens", "output_tokens"))
    speed = _median(_requests_per_second(each.records) for each in repetitions)
    cost = None
    if price_per_gpu_hour is not None and speed and repetitions[0].num_engines:
        cost = repetitions[0].num_engines * gpus_per_engine * price_per_gpu_hour / 3600 / speed
    return CellSummary(
        mode=mode,
        **_place(cell),
        output_tokens=cell.output_tokens or round(answer),
        mean_prompt_tokens=prompt,
        repetitions=len(repetitions),
        requests=len(records),
        failed=sum(record.error is not None for record in records),
        failures=dict(Counter(kind for record in records if (kind := record.failure_kind)).most_common()),
        cancelled=sum(record.cancelled for record in records),
        corruptions=engines.corruptions,
        answers_differing=sum(differing_answers(mode, each.repetition, others) for each in repetitions),
        preemptions=engines.preemptions,
        transfers=engines.transfers,
        transfers_failed=engines.transfers_failed,
        ttft_ms=_figures(samples_of(repetitions, "ttft_ms")),
        tpot_ms=_figures(samples_of(repetitions, "tpot_ms")),
        itl_ms=_gaps(repetitions),
        e2e_ms=_figures(samples_of(repetitions, "e2e_ms")),
        handoff_ms=_figures(
            [[each.handoffs_ms.get(record.request_id) for record in _succeeded(each)] for each in repetitions]
        ),
        **_engine_fields(engines, records),
        stall=_stall(repetitions, engines),
        requests_per_second=speed or 0.0,
        output_tokens_per_second=(speed or 0.0) * answer,
        cost_per_request=cost,
        cost_per_million_tokens=cost / (prompt + answer) * 1e6 if cost is not None else None,
        idle_share=_median(each.idle_share for each in repetitions),
        warnings=sorted({warning for each in repetitions for warning in each.warnings}),
    )


def samples_of(repetitions: Sequence[MeasuredCell], metric: str) -> list[list[float | None]]:
    """Per repetition, the metric of each request in the order of the plan; None for one that failed."""
    return [
        [getattr(record, metric) if record.has_succeeded else None for record in each.records] for each in repetitions
    ]


def ratios_of(
    mode: Sequence[MeasuredCell], baseline: Sequence[MeasuredCell], metrics: Sequence[str] = ("ttft_ms", "tpot_ms")
) -> list[Ratio]:
    """One mode over another in one cell, over the repetitions that both have."""
    both = {each.repetition for each in mode} & {each.repetition for each in baseline}
    above = [each for each in mode if each.repetition in both]
    below = [each for each in baseline if each.repetition in both]
    found = []
    for metric in metrics:
        estimates = paired_ratio(samples_of(above, metric), samples_of(below, metric)) if both else None
        found += [
            Ratio(
                mode=mode[0].mode,
                baseline=baseline[0].mode,
                group=mode[0].cell.group,
                cell=mode[0].cell.name,
                metric=metric,
                percentile=percentile,
                **msgspec.structs.asdict(estimate),
            )
            for percentile, estimate in zip(PERCENTILES, estimates or (), strict=False)
            if estimate is not None
        ]
    return found


def _place(cell: Cell) -> dict[str, Any]:
    return {
        "group": cell.group,
        "cell": cell.name,
        "rate": cell.rate,
        "prompt_tokens": cell.prompt_tokens,
        "memory": str(cell.memory),
        "prefix_hit": cell.shared_tokens / cell.prompt_tokens if cell.shared_tokens else 0.0,
    }


def _engine_fields(engines: EngineFigures, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What needs both the engines' figures and the client's."""
    ttft = _mean_ttft(records)
    breakdown = engines.breakdown(ttft) if ttft is not None else None
    beyond = breakdown.transfer + breakdown.first_step + breakdown.rest if breakdown is not None else None
    return {
        "cached_share": engines.cached_share,
        "beyond_prefill_ms": beyond,
        "breakdown_ms": breakdown,
        "descriptors_per_transfer": engines.descriptors_per_transfer,
        "bytes_per_transfer": engines.bytes_per_transfer,
        "post_ms": engines.post_ms,
        "emulator_late_share": engines.emulator_late_share,
        "transfer_ms": engines.transfer_ms,
        "reserved_block_seconds": (
            engines.reserved_block_seconds / len(records) if engines.reserved_block_seconds is not None else None
        ),
    }


def _mean_ttft(records: Iterable[RequestRecord]) -> float | None:
    """Of those that succeeded, in ms; None if none did."""
    ttfts = [record.ttft_ms for record in records if record.has_succeeded and record.ttft_ms is not None]
    return float(np.mean(ttfts)) if ttfts else None


def _stall(repetitions: Sequence[MeasuredCell], engines: EngineFigures) -> Stall | None:
    # Not the median gap: on a busy machine most chunks may come together with another, with no gap between them.
    step = _median(record.tpot_ms for each in repetitions for record in _succeeded(each))
    if not step:
        return None
    mode = repetitions[0].mode
    if mode == Mode.DECODE_ONLY:
        busy = _mean_ttft(record for each in repetitions for record in each.records) or 0.0
    else:
        busy = engines.busy_ms(is_streamed=mode == Mode.PUSH)
    worst = []
    for each in repetitions:
        found = windows(each.records, step_ms=step, transfer_ms=busy)
        worst += gaps_beside(streams(each.records), found)
    if not worst:
        return None
    p50, p99 = (float(each) for each in np.percentile(worst, (50, 99)))
    return Stall(
        transfers=len(worst),
        step_ms=step,
        transfer_ms=busy,
        p50_ms=p50,
        p99_ms=p99,
        p99_steps=(p99 - step) / step,
    )


def _figures(samples: Samples) -> Figures | None:
    estimates = percentiles(samples)
    if estimates is None:
        return None
    p50, p95, p99 = estimates
    assert p50 is not None, "the median is always there"
    return Figures(p50.value, _value(p95), _value(p99), (p50.low, p50.high), _interval(p95), _interval(p99))


def _gaps(repetitions: Sequence[MeasuredCell]) -> Gaps | None:
    every = [[gap for record in _succeeded(each) for gap in record.itl_ms] for each in repetitions]
    known = [np.percentile(gaps, PERCENTILES) for gaps in every if gaps]
    return Gaps(*(float(each) for each in np.median(known, axis=0))) if known else None


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _interval(estimate: Estimate | None) -> tuple[float, float] | None:
    return None if estimate is None else (estimate.low, estimate.high)


def _mean_tokens(records: Sequence[RequestRecord], name: str) -> float:
    """Over the requests that succeeded; 0 if none did."""
    counts = [getattr(record, name) for record in records if record.has_succeeded]
    return float(np.mean(counts)) if counts else 0.0


def _succeeded(cell: MeasuredCell) -> list[RequestRecord]:
    return [record for record in cell.records if record.has_succeeded]


def _requests_per_second(records: Sequence[RequestRecord]) -> float | None:
    ends = [record.sent_s + record.e2e_ms / 1000 for record in records if record.e2e_ms is not None]
    duration = max(ends) - min(record.sent_s for record in records) if ends else 0.0
    return len(ends) / duration if duration else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
