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

_LISTED = 200
"""Ended requests in a list; the journal keeps more for those who know an id."""


class _EventStatus(msgspec.Struct):
    at_seconds: float
    what: str
    facts: dict[str, str | int | float]


class _PhaseStatus(msgspec.Struct):
    name: str
    begin_seconds: float
    end_seconds: float


class TimelineStatus(msgspec.Struct):
    """One request. Times are in seconds since its arrival, `arrived_at` since the epoch; no `status` is no end yet."""

    request_id: str
    endpoint: str
    arrived_at: float
    age_seconds: float
    mode: str
    path: str
    status: int | None
    phases: list[_PhaseStatus]
    events: list[_EventStatus]


class _Requests(msgspec.Struct):
    """`in_flight` from the oldest on, `recent` (ended) from the newest on."""

    in_flight: list[TimelineStatus]
    recent: list[TimelineStatus]


def all_requests(service: Service) -> object:
    now = time.monotonic()
    journal = service.journal
    return _Requests(
        [_describe(each, now) for each in journal.in_flight],
        [_describe(each, now) for each in journal.recent[:_LISTED]],
    )


def one_request(service: Service, request: Request) -> object:
    """Raises `RouterError` (404) for a request that is not known, or not known any more."""
    request_id = request.path_params["id"]
    timeline = service.journal.find(request_id)
    if timeline is None:
        raise RouterError(404, f"Nothing is known (any more) of a request {request_id}.", code="unknown_request")
    return _describe(timeline, time.monotonic())


def _describe(timeline: Timeline, now: float) -> TimelineStatus:
    return TimelineStatus(
        request_id=timeline.request_id,
        endpoint=timeline.endpoint,
        arrived_at=timeline.arrived_at,
        age_seconds=now - timeline.began,
        mode=timeline.mode,
        path=timeline.path,
        status=timeline.status,
        phases=[_PhaseStatus(phase.name, phase.begin, phase.end) for phase in timeline.phases(now)],
        events=[_EventStatus(event.at, event.what, event.facts) for event in timeline.events],
    )
