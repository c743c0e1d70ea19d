"""Figures from records. Pure; the definitions are those of `vllm bench serve`, so that both agree on the same run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from kvberth.bench.records import RequestRecord

__all__ = [
    "BEHIND_MS",
    "LEAST_IDLE_SHARE",
    "MOST_LATE_MS",
    "MOST_TOKENS_PER_CHUNK",
    "Percentiles",
    "Summary",
    "summarise",
]

LEAST_IDLE_SHARE = 0.20
"""With less than this of the machine idle, what is measured is the machine's scheduler."""

MOST_LATE_MS = 5.0
"""A p99 of the lateness above this makes some of the traffic another than was planned."""

BEHIND_MS = 50.0
"""A p50 of the lateness above this: not single requests were late, the generator has fallen behind."""

MOST_TOKENS_PER_CHUNK = 1.05
"""Above this the gaps between chunks are not the time between tokens."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of one quantity; percentiles interpolate linearly, as numpy's do."""

    mean: float
    p50: float
    p95: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    Attributes:
        requests, succeeded, failed, cancelled: counts; the first is the sum of the others. A request was cancelled if
            its client went away as planned.
        failures: how many failed, by kind of failure.
        duration_seconds: from the first request's sending to the last token of a request that succeeded.
        prompt_tokens, output_tokens: sums over the requests that succeeded.
        requests_per_second, output_tokens_per_second: those that succeeded, over the duration.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: over the requests that succeeded (`itl_ms` over all their gaps); None if none.
        late_ms: sent after plan, over all requests that were sent.
        kept_up: the generator sent the planned traffic; False makes the figures those of another load.
        tokens_per_chunk: output tokens over chunks, of the requests that succeeded; None if none.
        idle_share: of all cores while it ran, from 0 to 1; None if not measured.
        warnings: what makes the figures doubtful.
    """

    requests: int
    succeeded: int
    failed: int
    cancelled: int
    failures: dict[str, int]
    duration_seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    late_ms: Percentiles | None
    kept_up: bool
    tokens_per_chunk: float | None
    idle_share: float | None
    warnings: list[str]


def summarise(records: Sequence[RequestRecord], *, idle_share: float | None = None) -> Summary:
    """The figures of `records`, in any order."""
    succeeded = [record for record in records if record.has_succeeded]
    ends = [record.sent_s + record.e2e_ms / 1000 for record in succeeded if record.e2e_ms is not None]
    duration = max(ends) - min(record.sent_s for record in records) if ends else 0.0
    output_tokens = sum(record.output_tokens for record in succeeded)
    late = _percentiles(record.late_ms for record in records if record.was_sent)
    kept_up = late is None or late.p50 <= BEHIND_MS
    chunks = sum(record.chunks for record in succeeded)
    tokens_per_chunk = output_tokens / chunks if chunks else None
    return Summary(
        requests=len(records),
        succeeded=len(succeeded),
        failed=sum(record.error is not None for record in records),
        cancelled=sum(record.cancelled for record in records),
        failures=dict(Counter(kind for record in records if (kind := record.failure_kind)).most_common()),
        duration_seconds=duration,
        prompt_tokens=sum(record.prompt_tokens for record in succeeded),
        output_tokens=output_tokens,
        requests_per_second=len(succeeded) / duration if duration else 0.0,
        output_tokens_per_second=output_tokens / duration if duration else 0.0,
        ttft_ms=_percentiles(record.ttft_ms for record in succeeded),
        tpot_ms=_percentiles(record.tpot_ms for record in succeeded),
        itl_ms=_percentiles(gap for record in succeeded for gap in record.itl_ms),
        e2e_ms=_percentiles(record.e2e_ms for record in succeeded),
        late_ms=late,
        kept_up=kept_up,
        tokens_per_chunk=tokens_per_chunk,
        idle_share=idle_share,
        warnings=[*_doubts_of_the_generator(idle_share, late), *_doubts_of_the_gaps(tokens_per_chunk)],
    )


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None
    p50, p95, p99 = np.percentile(known, (50, 95, 99))
    return Percentiles(float(known.mean()), float(p50), float(p95), float(p99))


def _doubts_of_the_generator(idle_share: float | None, late: Percentiles | None) -> Iterator[str]:
    if idle_share is not None and idle_share < LEAST_IDLE_SHARE:
        yield f"the machine had only {idle_share:.0%} idle: the figures show this machine, not the servers"
    if late is not None and late.p50 > BEHIND_MS:
        yield (
            f"the generator has fallen behind: half the requests went out more than {late.p50:.0f} ms late, so these "
            "are figures of another load than the planned one"
        )
    elif late is not None and late.p99 > MOST_LATE_MS:
        yield f"the generator could not keep up: the p99 of its lateness is {late.p99:.1f} ms"


def _doubts_of_the_gaps(tokens_per_chunk: float | None) -> Iterator[str]:
    if tokens_per_chunk is not None and tokens_per_chunk > MOST_TOKENS_PER_CHUNK:
        yield f"the server sends {tokens_per_chunk:.2f} tokens per chunk: ITL is the gap between chunks, not tokens"
