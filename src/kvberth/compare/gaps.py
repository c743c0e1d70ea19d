"""What somebody else's transfer does to the tokens of a request that is being answered. Pure.

The client cannot see a transfer, but it sees when it ended: the first token comes a decode step later. So a transfer is
given the window before its request's first token, as long as the decode worker was at work with it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvberth.bench import RequestRecord

__all__ = ["Stream", "Window", "gaps_beside", "streams", "windows"]


@dataclass(frozen=True, slots=True)
class Stream:
    """One request's answer: when each chunk came, in milliseconds from the start of the measurement."""

    index: int
    times_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """When the transfer of request `index` was under way, in the same milliseconds."""

    index: int
    start_ms: float
    end_ms: float


def streams(records: Sequence[RequestRecord]) -> list[Stream]:
    """Of the requests that got a token."""
    return [
        Stream(
            record.index,
            tuple(itertools.accumulate(record.itl_ms, initial=record.sent_s * 1000 + record.ttft_ms)),
        )
        for record in records
        if record.ttft_ms is not None
    ]


def windows(records: Sequence[RequestRecord], *, step_ms: float, transfer_ms: float) -> list[Window]:
    """The transfer of each request that got a token.

    Args:
        step_ms: a decode step, which lies between a transfer's end and the first token.
        transfer_ms: how long a transfer keeps the decode worker, where the answer has no timeline that says it.
    """
    found = []
    for record in records:
        if record.ttft_ms is not None:
            end = record.sent_s * 1000 + record.ttft_ms
            moving = _moving_ms(record)
            found.append(Window(record.index, end - step_ms - (transfer_ms if moving is None else moving), end))
    return found


def gaps_beside(others: Sequence[Stream], transfers: Sequence[Window]) -> list[float]:
    """For each transfer beside which another request was being answered: the longest gap between tokens there."""
    worst = []
    for window in transfers:
        gaps = [
            later - earlier
            for stream in others
            if stream.index != window.index and stream.times_ms[-1] > window.start_ms
            for earlier, later in itertools.pairwise(stream.times_ms)
            if later > window.start_ms and earlier < window.end_ms
        ]
        if gaps:
            worst.append(max(gaps))
    return worst


def timeline_of(record: RequestRecord) -> dict[str, float]:
    """What kvberth's connector says of a handoff, in seconds; empty if the answer says nothing."""
    params = record.kv_transfer_params or {}
    transfer = params.get("transfer")
    timeline = transfer.get("timeline") if isinstance(transfer, dict) else None
    if not isinstance(timeline, dict):
        return {}
    return {name: float(moment) for name, moment in timeline.items() if isinstance(moment, int | float)}


def handoff_ms(record: RequestRecord) -> float | None:
    """From the end of the prefill to the end of the handoff, which is what a client waits for; None if not known."""
    timeline = timeline_of(record)
    if "prefill_done" not in timeline or "ended" not in timeline:
        return None
    return (timeline["ended"] - max(0.0, timeline["prefill_done"])) * 1000


def _moving_ms(record: RequestRecord) -> float | None:
    timeline = timeline_of(record)
    if "moving" not in timeline or "ended" not in timeline:
        return None
    return (timeline["ended"] - timeline["moving"]) * 1000
