"""Counts the tokens of a stream while it passes, and the times between its chunks. Pure.

This runs for every chunk of every stream, so it is one look at the clock, one search in a short list and one count of
ends of events. How many tokens there were is found out behind the last one.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from kvberth.router.continuation import Continuation
from kvberth.router.timeline import Timeline

__all__ = ["GAP_BOUNDS", "Tally", "Times"]

# From the step of a small model to a stall that everybody notices.
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 6.4)
"""Seconds."""

# OpenAI's two APIs and Anthropic's. Within a JSON string a quotation mark is escaped: this can be nothing but a field.
_USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*([0-9]+)')
# The usage, an end of message and [DONE] may come in a chunk each.
_TAIL_CHUNKS = 3
_EVENT_END = b"\n\n"


class Times:
    """How many times there were of which length: `counts[i]` are those up to `bounds[i]`, the last one all longer."""

    __slots__ = ("bounds", "counts", "total_seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_seconds += seconds


class Tally:
    """One request's stream, also if it goes on at another engine.

    Args:
        clock: the one of the request's timeline.
        gaps: the times between its chunks are added there as they pass.
        continuation: gets every chunk, and says what the client gets of it; None passes it unchanged.
    """

    def __init__(self, clock: Callable[[], float], gaps: Times, continuation: Continuation | None) -> None:
        self._clock = clock
        self._gaps = gaps
        self._continuation = continuation
        self._last_at: float | None = None
        self._num_events = 0
        self._tail: deque[bytes] = deque(maxlen=_TAIL_CHUNKS)

    def pass_on(self, events: bytes) -> bytes:
        """What the client gets of some whole events."""
        now = self._clock()
        if self._last_at is not None:
            self._gaps.add(now - self._last_at)
        self._last_at = now
        self._num_events += events.count(_EVENT_END)
        if self._continuation is not None:
            events = self._continuation.pass_on(events)
        self._tail.append(events)
        return events

    def write_to(self, timeline: Timeline) -> None:
        """What has been counted, when the stream has ended."""
        if self._last_at is not None:
            timeline.last_token_at = self._last_at - timeline.began
            timeline.output_tokens = self._num_tokens()

    def _num_tokens(self) -> int:
        """As the engine says at the end; otherwise ids of tokens; otherwise events, an end without a token aside."""
        if said := _USAGE.findall(b"".join(self._tail)):
            return int(said[-1])
        if self._continuation is not None and (num_ids := self._continuation.num_tokens):
            return num_ids
        return max(0, self._num_events - 1)
