"""Traces of requests: what the router needs of them, and how it is when there are none.

OpenTelemetry is known to `otel.py` only, which is imported where an endpoint for traces is set: it is an extra, and the
router runs without.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from starlette.datastructures import Headers

from kvberth.router.answer import Header
from kvberth.router.timeline import Timeline

__all__ = ["Trace", "Tracing", "TracingError", "tracing_to"]


class TracingError(Exception):
    """Traces are asked for, and cannot be made."""


class Trace(Protocol):
    """One request's."""

    def leg_headers(self, kept: list[Header]) -> list[Header]:
        """The headers of one more leg, whose start is noted in the timeline already: `kept` and the leg's place here.

        An engine that traces puts its own spans below the leg's.
        """
        ...

    def end(self) -> None:
        """The timeline has ended."""
        ...


class Tracing(Protocol):
    """All requests' of one router."""

    def begin(self, timeline: Timeline, headers: Headers) -> Trace:
        """A request has arrived, with its client's headers."""
        ...


class _Untraced:
    """Headers pass unchanged, those of a client that traces among them."""

    def begin(self, _timeline: Timeline, _headers: Headers) -> Trace:
        return self

    def leg_headers(self, kept: list[Header]) -> list[Header]:
        return kept

    def end(self) -> None:
        pass


def tracing_to(endpoint: str | None) -> Callable[[], AbstractAsyncContextManager[Tracing]]:
    """What opens the way to a collector; no endpoint, no traces. Raises `TracingError`."""
    if endpoint is None:
        return _untraced
    try:
        from kvberth.router.otel import exporting_to  # noqa: PLC0415
    except ImportError as error:
        text = f"otlp_traces_endpoint: needs OpenTelemetry, pip install 'kvberth[tracing]' ({error})"
        raise TracingError(text) from error
    return exporting_to(endpoint)


@asynccontextmanager
async def _untraced() -> AsyncIterator[Tracing]:
    yield _Untraced()
