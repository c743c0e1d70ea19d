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
        transfer_ms: how long a transfer keeps the decode worker, on average.
    """
    ends = [record.sent_s * 1000 + record.ttft_ms for record in records if record.ttft_ms is not None]
    indices = [record.index for record in records if record.ttft_ms is not None]
    return [Window(index, end - step_ms - transfer_ms, end) for index, end in zip(indices, ends, strict=True)]


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
