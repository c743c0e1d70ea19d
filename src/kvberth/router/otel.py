"""Traces with OpenTelemetry: the only module that imports it.

The spans of a request and of its legs begin when they do, so that the legs can carry them on; all else is said when the
request has ended, from its timeline. A client that traces is the parent, and its decision whether to sample counts.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from kvberth import __version__
from kvberth.router import spans
from kvberth.router.answer import Header
from kvberth.router.timeline import Timeline
from kvberth.router.tracing import Trace, Tracing, TracingError

__all__ = ["OtelTracing", "exporting_to"]

_SERVICE = "kvberth-router"
_LONGEST_CLOSE_SECONDS = 5.0
# W3C's, and no other, because it is what vLLM reads.
_propagator = TraceContextTextMapPropagator()
_TRACE_HEADERS = frozenset(_propagator.fields)


def exporting_to(endpoint: str) -> Callable[[], AbstractAsyncContextManager[Tracing]]:
    """Traces for the collector at `endpoint`; what is left is sent when the context ends, if it can be sent soon.

    Raises `TracingError`.
    """
    exporter = _exporter(endpoint)

    @asynccontextmanager
    async def exporting() -> AsyncIterator[Tracing]:
        tracing = OtelTracing(BatchSpanProcessor(exporter))
        try:
            yield tracing
        finally:
            # It waits for the collector, perhaps for half a minute. Who stops a router has less patience.
            closing = threading.Thread(target=tracing.close, name="kvberth-otel", daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, _LONGEST_CLOSE_SECONDS)

    return exporting


def _exporter(endpoint: str) -> SpanExporter:
    """By the same rules as vLLM's, so that one endpoint is right for engines and router."""
    protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    match protocol or "grpc":
        case "grpc":
            return GrpcExporter(endpoint, insecure=None if "://" in endpoint else True)
        case "http/protobuf":
            return HttpExporter(endpoint)
        case other:
            text = f"{OTEL_EXPORTER_OTLP_TRACES_PROTOCOL}: must be grpc or http/protobuf, got {other!r}"
            raise TracingError(text)


class OtelTracing:
    """Gives what is traced to `processor`, which `close` ends. For the event loop's thread, `close` for any."""

    def __init__(self, processor: SpanProcessor) -> None:
        named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)
        resource = Resource.create({SERVICE_NAME: named or _SERVICE, SERVICE_VERSION: __version__})
        # Not the process's own provider: several routers can live in one process.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvberth.router", __version__)

    def begin(self, timeline: Timeline, headers: Headers) -> Trace:
        # A client's tracestate may be spread over several headers.
        carried = {name: ",".join(headers.getlist(name)) for name in _TRACE_HEADERS if name in headers}
        span = self._tracer.start_span(
            f"{timeline.method} {timeline.endpoint}",
            _propagator.extract(carried),
            SpanKind.SERVER,
            spans.root_attributes(timeline),
            start_time=_nanoseconds(timeline, 0.0),
        )
        if span.is_recording():
            timeline.trace_id = f"{span.get_span_context().trace_id:032x}"
        return _OtelTrace(self._tracer, timeline, span)

    def close(self) -> None:
        """Send what is left. Blocks for as long as the processor takes."""
        self._provider.shutdown()


class _OtelTrace:
    """One request's: its span and its legs' so far."""

    __slots__ = ("_context", "_legs", "_root", "_timeline", "_tracer")

    def __init__(self, tracer: Tracer, timeline: Timeline, root: Span) -> None:
        self._tracer = tracer
        self._timeline = timeline
        self._root = root
        self._context = set_span_in_context(root)
        self._legs: list[Span] = []

    def leg_headers(self, kept: list[Header]) -> list[Header]:
        begin = _nanoseconds(self._timeline, self._timeline.events[-1].at)
        leg = self._tracer.start_span("leg", self._context, SpanKind.CLIENT, start_time=begin)
        self._legs.append(leg)
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(leg))
        return [*(header for header in kept if header[0] not in _TRACE_HEADERS), *carrier.items()]

    def end(self) -> None:
        if not self._root.is_recording():
            return
        legs = iter(self._legs)
        for span in spans.children(self._timeline):
            begin = _nanoseconds(self._timeline, span.begin)
            made = next(legs, None) if span.is_leg else None
            self._tell(made or self._tracer.start_span(span.name, self._context, start_time=begin), span)
        self._tell(self._root, spans.root(self._timeline))

    def _tell(self, made: Span, span: spans.Span) -> None:
        made.update_name(span.name)
        made.set_attributes(span.attributes)
        for event in span.events:
            made.add_event(event.what, event.facts, _nanoseconds(self._timeline, event.at))
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.description or span.error))
        made.end(_nanoseconds(self._timeline, span.end))


def _nanoseconds(timeline: Timeline, at: float) -> int:
    """Since the epoch, of a moment in seconds since the arrival."""
    return int((timeline.arrived_at + at) * 1e9)
