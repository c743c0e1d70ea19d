"""Figures from records. Pure; the definitions are those of `vllm bench serve`, so that both agree on the same run."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kvberth.bench.records import RequestRecord

__all__ = ["LEAST_IDLE_SHARE", "MOST_LATE_MS", "Percentiles", "Summary", "summarise"]

LEAST_IDLE_SHARE = 0.20
"""With less than this of the machine idle, what is measured is the machine's scheduler."""

MOST_LATE_MS = 5.0
"""A p99 of the lateness above this makes the traffic another than was planned."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of one quantity; percentiles interpolate linearly, as numpy's do."""

    mean: float
    p50: float
    p95: float
    p99: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    Attributes:
        requests, succeeded, failed: counts.
        failures: how many failed, by kind of failure.
        duration_seconds: from the first request's sending to the last token of a request that succeeded.
        prompt_tokens, output_tokens: sums over the requests that succeeded.
        requests_per_second, output_tokens_per_second: those that succeeded, over the duration.
        ttft_ms, tpot_ms, itl_ms, e2e_ms: over the requests that succeeded (`itl_ms` over all their gaps); None if none.
        late_ms: sent after plan, over all requests.
        idle_share: of all cores while it ran, from 0 to 1; None if not measured.
        warnings: what makes the figures doubtful.
    """

    requests: int
    succeeded: int
    failed: int
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
    idle_share: float | None
    warnings: list[str]


def summarise(records: Sequence[RequestRecord], *, idle_share: float | None = None) -> Summary:
    """The figures of `records`, in any order."""
    succeeded = [record for record in records if record.error is None]
    ends = [record.sent_s + record.e2e_ms / 1000 for record in succeeded if record.e2e_ms is not None]
    duration = max(ends) - min(record.sent_s for record in records) if ends else 0.0
    output_tokens = sum(record.output_tokens for record in succeeded)
    late = _percentiles(record.late_ms for record in records)
    return Summary(
        requests=len(records),
        succeeded=len(succeeded),
        failed=len(records) - len(succeeded),
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
        idle_share=idle_share,
        warnings=_warnings(idle_share, late),
    )


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None
    p50, p95, p99 = np.percentile(known, (50, 95, 99))
    return Percentiles(float(known.mean()), float(p50), float(p95), float(p99))


def _warnings(idle_share: float | None, late: Percentiles | None) -> list[str]:
    warnings = []
    if idle_share is not None and idle_share < LEAST_IDLE_SHARE:
        warnings.append(
            f"the machine had only {idle_share:.0%} idle: the figures show this machine, not the servers",
        )
    if late is not None and late.p99 > MOST_LATE_MS:
        warnings.append(f"the generator could not keep up: the p99 of its lateness is {late.p99:.1f} ms")
    return warnings
