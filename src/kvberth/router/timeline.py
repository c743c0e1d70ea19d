"""What happened to one request, and when: for people, for traces and for metrics. No I/O and no clock.

A timeline is written while the request is served and read by everybody else: `phases` says what the time went into.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

__all__ = ["CLIENT_STALLED", "CLIENT_WENT_AWAY", "Event", "Fact", "Phase", "Timeline", "What"]

# Ends that no error tells of, because nobody was there to read it.
CLIENT_STALLED = "client_stalled"
CLIENT_WENT_AWAY = "client_went_away"

Fact = str | int | float
_SPLIT = ("push", "pull")


class What(StrEnum):
    """What can happen. Behind each, the facts that are noted with it."""

    ADMITTED = "admitted"  # prompt_tokens (an estimate), streamed, model
    BINDING_CHOSEN = "binding_chosen"  # binding, reason
    PREFILL_SENT = "prefill_sent"  # engine, reason, transfer_id
    PREFILL_BEGAN = "prefill_began"  # the first step of the prompt has begun
    DECODE_SENT = "decode_sent"  # engine, reason, attempt
    REGISTERED = "registered"  # the decode worker's blocks are known to the prefill worker
    PREFILL_DONE = "prefill_done"
    TRANSFERRED = "transferred"  # all KV has arrived
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    LEG_FAILED = "leg_failed"  # leg, kind, detail: hidden from the client, or its end
    RETRIED = "retried"  # leg, reason: a failure that is hidden from the client
    CONTINUED = "continued"  # tokens: a broken stream goes on behind so many
    LEFT_UNDIVIDED = "left_undivided"  # reason
    ENDED = "ended"  # status; error and message, where the router itself had to say what went wrong


_SENT = (What.PREFILL_SENT, What.DECODE_SENT)


class Event(msgspec.Struct, frozen=True):
    """`at` is in seconds since the request arrived."""

    at: float
    what: What
    facts: dict[str, Fact]


@dataclass(frozen=True, slots=True)
class Phase:
    """What a stretch of time went into: `queue`, `prefill`, `transfer` or `decode`. Seconds since the arrival."""

    name: str
    begin: float
    end: float


@dataclass(slots=True, eq=False)
class Timeline:
    """One request's. `arrived_at` is in seconds since the epoch, `began` on the clock that `note` is given.

    Attributes:
        endpoint: the route, without what stands in its variable parts.
        waited_seconds: for its turn at the router; None if it got none.
        status: None while the request is served; 499 is a client that went away.
        error: the code of the error that the client was told, in mid-stream perhaps, or why nobody was there to read.
        output_tokens: of a stream, as far as they can be counted; see `Tally`.
        last_token_at: of a stream, in seconds since the arrival.
        trace_id: where the request is traced, in hexadecimal.
    """

    request_id: str
    endpoint: str
    arrived_at: float
    began: float
    mode: str = ""
    path: str = "none"
    waited_seconds: float | None = None
    status: int | None = None
    error: str | None = None
    output_tokens: int | None = None
    last_token_at: float | None = None
    trace_id: str | None = None
    method: str = "POST"
    events: list[Event] = field(default_factory=list)

    @property
    def binding(self) -> str:
        """`early`, `jit` or `late`; `none` if it was not split."""
        if self.path in _SPLIT:
            for event in reversed(self.events):
                if event.what is What.BINDING_CHOSEN:
                    return str(event.facts["binding"])
        return "none"

    @property
    def queued_until(self) -> float | None:
        """The end of the phase `queue`; see `phases`."""
        began = self.first(What.PREFILL_BEGAN)
        if began is not None:
            return began
        # The first leg that was sent: what has come first is noted first.
        return next((event.at for event in self.events if event.what in _SENT), None)

    @property
    def is_abandoned(self) -> bool:
        """Its client went away, or read nothing for too long."""
        return self.error in (CLIENT_STALLED, CLIENT_WENT_AWAY)

    @property
    def is_answered(self) -> bool:
        """The client has the whole of an answer that is no error."""
        return self.status == 200 and self.error is None

    def note(self, now: float, what: What, **facts: Fact) -> None:
        self.events.append(Event(max(0.0, now - self.began), what, facts))

    def end(self, now: float, status: int, **facts: Fact) -> None:
        self.status = status
        self.note(now, What.ENDED, status=status, **facts)

    def first(self, what: What) -> float | None:
        """When it happened for the first time; None if it did not."""
        for event in self.events:
            if event.what is what:
                return event.at
        return None

    def last(self, what: What, before: float | None = None) -> float | None:
        """When it happened for the last time, before this time if one is given; None if it did not."""
        return next((e.at for e in reversed(self.events) if e.what is what and (before is None or e.at < before)), None)

    def phases(self, now: float) -> list[Phase]:
        """What the time until the end, or until `now`, went into: without gaps, in order.

        `queue` lasts until a prefill worker's first step where that is known, and until the router sent the first leg
        otherwise; `prefill` to the end of the last prefill leg; `transfer` from there to the first token, the decode
        worker's own first step included; `decode` is the rest. An undivided request has no `prefill` and no `transfer`:
        until its first token it is in `prefill`, which its decode worker does.
        """
        end = self.first(What.ENDED)
        until = now - self.began if end is None else end
        marks = [("queue", 0.0), *self._marks()]
        ends = [*(begin for _, begin in marks[1:]), until]
        return [Phase(name, min(begin, until), min(end, until)) for (name, begin), end in zip(marks, ends, strict=True)]

    def _marks(self) -> Iterator[tuple[str, float]]:
        """Where each phase behind the first begins, in order."""
        first_token = self.first(What.FIRST_TOKEN)
        at = self.queued_until
        if at is not None:
            yield "prefill", at
            done = self.last(What.PREFILL_DONE, before=first_token)
            if done is not None:
                at = max(at, done)
                yield "transfer", at
        # Of an answer in one piece nobody knows when its first token came: as soon as all KV was there, at best.
        decodes = first_token if first_token is not None else self.last(What.TRANSFERRED)
        if decodes is not None:
            yield "decode", max(at or 0.0, decodes)
