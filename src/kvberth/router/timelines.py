"""Timelines of requests as JSON, for operators: `/kvberth/requests` and `/kvberth/requests/{id}`.

They name engines, so they are behind the admin API's key (or its rule of loopback), not behind clients' keys.
"""

import time

import msgspec
from starlette.requests import Request

from kvberth.router.errors import RouterError
from kvberth.router.exchange import Service
from kvberth.router.timeline import Timeline

__all__ = ["TimelineStatus", "all_requests", "one_request"]

_LISTED_IN_FLIGHT = 200
"""Two thousand with their events are three megabytes and 60 ms; the oldest are those that somebody looks for."""
_LISTED_RECENT = 200
"""Ended ones; the journal keeps more for those who know an id."""
_MAX_DIGITS = 16


class _EventStatus(msgspec.Struct):
    at_seconds: float
    what: str
    facts: dict[str, str | int | float]


class _PhaseStatus(msgspec.Struct):
    name: str
    begin_seconds: float
    end_seconds: float


class TimelineStatus(msgspec.Struct):
    """One request. Times are in seconds since its arrival, `arrived_at` since the epoch; no `status` is no end yet.

    `output_tokens` are those of a stream that has ended, `trace_id` is there if the request is traced.
    """

    request_id: str
    endpoint: str
    arrived_at: float
    age_seconds: float
    mode: str
    path: str
    binding: str
    status: int | None
    error: str | None
    output_tokens: int | None
    trace_id: str | None
    phases: list[_PhaseStatus]
    events: list[_EventStatus]


class _Answered(msgspec.Struct):
    """How many requests have ended so since the router's start, the relayed ones included."""

    path: str
    code: str
    requests: int


class _Requests(msgspec.Struct):
    """`in_flight` from the oldest on, `recent` (ended) from the newest on; neither need be all.

    `in_flight_total` counts those that `in_flight` is taken from, `ended_total` all that have ended. `admitted` are the
    requests that count towards `max_in_flight`: relayed ones do, and `queued` ones do not.
    """

    in_flight_total: int
    ended_total: int
    admitted: int
    queued: int
    max_in_flight: int
    answered: list[_Answered]
    in_flight: list[TimelineStatus]
    recent: list[TimelineStatus]


def all_requests(service: Service, request: Request) -> object:
    """The requests in flight and the last ones that ended: with `?after=` only those behind that `ended_total`.

    Raises `RouterError` (400) where that is no number.
    """
    now = time.monotonic()
    journal, admission = service.journal, service.admission
    in_flight = journal.in_flight
    new = journal.ended - _after(request)
    # A number that lies ahead is one of the router that was here before.
    num_recent = min(new, _LISTED_RECENT) if new >= 0 else _LISTED_RECENT
    return _Requests(
        in_flight_total=len(in_flight),
        ended_total=journal.ended,
        admitted=admission.in_flight,
        queued=admission.queued,
        max_in_flight=service.config.max_in_flight,
        answered=[_Answered(*each) for each in service.metrics.answered()],
        in_flight=[_describe(each, now) for each in in_flight[:_LISTED_IN_FLIGHT]],
        recent=[_describe(each, now) for each in journal.recent[:num_recent]],
    )


def one_request(service: Service, request: Request) -> object:
    """Raises `RouterError` (404) for a request that is not known, or not known any more."""
    request_id = request.path_params["id"]
    timeline = service.journal.find(request_id)
    if timeline is None:
        raise RouterError(404, f"Nothing is known (any more) of a request {request_id}.", code="unknown_request")
    return _describe(timeline, time.monotonic())


def _after(request: Request) -> int:
    text = request.query_params.get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS):
        raise RouterError(400, f"after: a count of ended requests, got {text!r}.", code="invalid_after", param="after")
    return int(text)


def _describe(timeline: Timeline, now: float) -> TimelineStatus:
    return TimelineStatus(
        request_id=timeline.request_id,
        endpoint=timeline.endpoint,
        arrived_at=timeline.arrived_at,
        age_seconds=now - timeline.began,
        mode=timeline.mode,
        path=timeline.path,
        binding=timeline.binding,
        status=timeline.status,
        error=timeline.error,
        output_tokens=timeline.output_tokens,
        trace_id=timeline.trace_id,
        phases=[_PhaseStatus(phase.name, phase.begin, phase.end) for phase in timeline.phases(now)],
        events=[_EventStatus(event.at, event.what, event.facts) for event in timeline.events],
    )
