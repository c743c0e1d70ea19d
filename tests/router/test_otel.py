"""Traces as a collector and the engines see them."""

import asyncio
import contextlib
import gzip
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from kvberth.router import RouterConfig, create_app
from kvberth.router.config import Mode
from kvberth.router.tracing import TracingError

from .fakes import D_ANSWER, answers, streams, until
from .timelines import ARRIVED_AT, a_push, failed, timeline, to_decode

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `tracing` is not installed")

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers

from kvberth.router.otel import OtelTracing, exporting_to

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
TOKEN = b'data: {"id":"1","choices":[{"text":" b"}]}\n\n'
DONE = b"data: [DONE]\n\n"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
SERVER, CLIENT = trace_pb2.Span.SPAN_KIND_SERVER, trace_pb2.Span.SPAN_KIND_CLIENT


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch):
    """What the developer's own environment sets is not part of any test."""
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def traceparent(*, is_sampled: bool = True) -> str:
    return f"00-{TRACE_ID}-{CLIENT_SPAN}-{is_sampled:02x}"


def traced(each, headers=None, num_legs=2):
    """The spans of a request whose legs have been sent, and the headers of these; the root's span is the last."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    trace = tracing.begin(each, Headers(headers or {}))
    sent = [dict(trace.leg_headers([("x-request-id", "r")])) for _ in range(num_legs)]
    trace.end()
    tracing.close()
    return exporter.get_finished_spans(), sent


def test_spans_have_the_times_of_the_timeline():
    """To the microsecond: they are told afterwards."""
    spans, _ = traced(a_push())
    times = {span.name: ((span.start_time / 1e9 - ARRIVED_AT), (span.end_time / 1e9 - ARRIVED_AT)) for span in spans}
    assert {
        name: (pytest.approx(begin, abs=1e-5), pytest.approx(end, abs=1e-5)) for name, (begin, end) in times.items()
    } == {
        "POST /v1/completions": (0.0, 3.5),
        "queue": (0.0, 0.5),
        "prefill": (times["prefill"][0], 1.5),  # began when its headers were made
        "decode": (times["decode"][0], 3.5),
        "bind": (0.25, 0.75),
        "transfer": (1.5, 1.625),
    }


def test_all_spans_are_the_root_s_children():
    """And the root has no parent where the client does not trace."""
    spans, _ = traced(a_push())
    root = spans[-1]
    assert (root.parent, root.kind) == (None, SpanKind.SERVER)
    assert {span.parent.span_id for span in spans[:-1]} == {root.context.span_id}
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    assert {span.name for span in spans if span.kind is SpanKind.CLIENT} == {"prefill", "decode"}


def test_the_timeline_names_its_trace():
    """So that the one leads to the other."""
    each = a_push()
    spans, _ = traced(each)
    assert each.trace_id == f"{spans[-1].context.trace_id:032x}"


def test_engines_get_the_span_of_their_leg():
    """What they trace hangs below it."""
    spans, sent = traced(a_push())
    ids = {span.name: f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}" for span in spans}
    assert [headers["traceparent"].rpartition("-")[0] for headers in sent] == [ids["prefill"], ids["decode"]]
    assert all(headers["x-request-id"] == "r" for headers in sent)


def test_a_client_that_traces_is_the_parent():
    """Its trace goes on, with its vendors' state."""
    spans, sent = traced(a_push(), {"traceparent": traceparent(), "tracestate": "a=1,b=2"})
    root = spans[-1]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, CLIENT_SPAN)
    assert {headers["tracestate"] for headers in sent} == {"a=1,b=2"}


def test_a_client_that_does_not_sample_is_not_traced():
    """Nothing is recorded, and the engines hear that it was not."""
    each = a_push()
    spans, sent = traced(each, {"traceparent": traceparent(is_sampled=False)})
    assert (spans, each.trace_id) == ((), None)
    assert all(headers["traceparent"].startswith(f"00-{TRACE_ID}-") for headers in sent)
    assert all(headers["traceparent"].endswith("-00") for headers in sent)


@pytest.mark.parametrize("header", ["00-1", "", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_traceparent_that_is_none_begins_a_trace(header):
    """As the W3C's recommendation has it."""
    spans, sent = traced(a_push(), {"traceparent": header})
    assert spans[-1].parent is None
    assert sent[0]["traceparent"] != header


def test_the_environment_can_turn_sampling_off(monkeypatch):
    """OpenTelemetry's own variables count."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    assert traced(a_push())[0] == ()
    assert len(traced(a_push(), {"traceparent": traceparent()})[0]) == 6


def test_a_disabled_sdk_passes_the_client_s_own_on(monkeypatch):
    """As if no endpoint were set."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traced(a_push())[0] == ()
    assert traced(a_push(), {"traceparent": traceparent()})[1][0]["traceparent"] == traceparent()


def test_the_service_has_a_name_that_can_be_changed(monkeypatch):
    """`kvberth-router`, or what OTEL_SERVICE_NAME says."""
    assert traced(a_push())[0][0].resource.attributes["service.name"] == "kvberth-router"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    assert traced(a_push())[0][0].resource.attributes["service.name"] == "edge"


def test_failures_have_a_status():
    """With the word that groups them and the text for people."""
    each = timeline(to_decode(0.0), failed(0.5, "decode"), ends_at=0.5, status=502, error="decode_failed")
    spans, _ = traced(each, num_legs=1)
    _, leg, root = spans
    assert (leg.status.status_code, leg.status.description) == (StatusCode.ERROR, "the decode worker is gone")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "decode_failed")


def test_protocols_are_vllm_s(monkeypatch):
    """grpc unless the environment says http/protobuf; anything else is one line."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(TracingError, match="must be grpc or http/protobuf, got 'carrier-pigeon'"):
        exporting_to("http://127.0.0.1:1")
    with pytest.raises(TracingError):
        create_app(RouterConfig(decode=("http://d:1",), otlp_traces_endpoint="http://127.0.0.1:1"))


def test_opentelemetry_is_not_needed_where_nothing_is_traced():
    """It is an extra: an application without traces imports none of it, one with traces says what is missing."""
    code = """
import sys
sys.modules["opentelemetry"] = None
from kvberth.router import RouterConfig, create_app
from kvberth.router.tracing import TracingError
create_app(RouterConfig(decode=("http://d:1",)))
try:
    create_app(RouterConfig(decode=("http://d:1",), otlp_traces_endpoint="http://c:1"))
except TracingError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert "pip install 'kvberth[tracing]'" in ended.stdout


@dataclass
class Collector:
    """An OTLP/HTTP receiver."""

    url: str = ""
    spans: list[trace_pb2.Span] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self, request: web.Request) -> web.Response:
        await self.may_answer.wait()
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip":
            with contextlib.suppress(gzip.BadGzipFile):  # aiohttp may have unpacked it
                body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response()

    async def trace(self) -> tuple[trace_pb2.Span, dict[str, trace_pb2.Span]]:
        """The root and its children by name, once the root is here."""
        await until(lambda: any(span.kind == SERVER for span in self.spans))
        (root,) = (span for span in self.spans if span.kind == SERVER)
        children = {span.name: span for span in self.spans if span.parent_span_id == root.span_id}
        assert len(children) == len(self.spans) - 1
        return root, children


@pytest.fixture
async def collector(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    made = Collector()
    made.may_answer.set()
    app = web.Application()
    app.router.add_post("/v1/traces", made.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield made
    await runner.cleanup()


def ids(engine) -> list[tuple[str, str]]:
    """Trace and parent as an engine was told them, by request."""
    return [tuple(seen.headers["traceparent"].split("-")[1:3]) for seen in engine.seen]


def attributes(span) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", Mode)
async def test_a_request_is_one_trace_with_its_engines(site, collector, mode):
    """The client's span is the root's parent, the root is the legs', and each engine is told its leg."""
    prefill, decode = await site.prefill(), await site.decode(streams(TOKEN, TOKEN, DONE))
    client = await site.router([prefill], [decode], mode=mode, otlp_traces_endpoint=collector.url)
    await client.text(STREAM, traceparent=traceparent(), tracestate="vendor=1")
    root, children = await collector.trace()
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, CLIENT_SPAN)
    assert root.name == "POST /v1/completions"
    for engine, name in ((prefill, "prefill"), (decode, "decode")):
        leg = children[name]
        assert leg.kind == CLIENT
        assert ids(engine) == [(TRACE_ID, leg.span_id.hex())]
        assert engine.seen[0].headers["tracestate"] == "vendor=1"
        assert attributes(leg)["server.port"] == engine.port
        assert (
            root.start_time_unix_nano <= leg.start_time_unix_nano <= leg.end_time_unix_nano <= root.end_time_unix_nano
        )
    said = attributes(root)
    assert (said["kvberth.path"], said["http.response.status_code"], said["gen_ai.request.model"]) == (mode, 200, "m")
    assert said["gen_ai.usage.output_tokens"] == 2
    assert attributes(children["decode"])["kvberth.transfer_id"] == prefill.seen[0].transfer["transfer_id"]


@pytest.mark.anyio
async def test_every_try_has_a_span_of_its_own(site, collector):
    """An engine that failed and the one that answered are told apart, in the trace as in what they were told."""
    prefill = await site.prefill()
    failing, good = await site.decode(answers({}, 500)), await site.decode(answers(D_ANSWER))
    client = await site.router([prefill], [failing, good], mode=Mode.PULL, otlp_traces_endpoint=collector.url)
    while not failing.seen:
        await client.text(PROMPT)
    await until(lambda: any(span.kind == SERVER and span.events for span in collector.spans))
    (root,) = (span for span in collector.spans if span.events)
    spans = {span.span_id.hex(): span for span in collector.spans if span.trace_id == root.trace_id}
    failed_leg, good_leg = (spans[ids(engine)[-1][1]] for engine in (failing, good))
    assert {span.name for span in (failed_leg, good_leg)} == {"decode"}
    assert failed_leg.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert attributes(failed_leg)["error.type"] == "server_error"
    assert {span.status.code for span in (root, good_leg)} == {trace_pb2.Status.STATUS_CODE_UNSET}
    assert [event.name for event in root.events] == ["retried"]


@pytest.mark.anyio
async def test_a_relayed_request_is_traced(site, collector):
    """Its route has no variable part, whatever the model is called."""
    decode = await site.decode()
    client = await site.router([await site.prefill()], [decode], otlp_traces_endpoint=collector.url)
    async with client.get("/v1/models/some/model") as response:
        assert response.status == 200
    root, children = await collector.trace()
    assert root.name == "GET /v1/models/{id:path}"
    assert ids(decode) == [(root.trace_id.hex(), children["relay"].span_id.hex())]


@pytest.mark.anyio
async def test_what_is_left_is_sent_at_the_end(collector, monkeypatch):
    """A router that stops takes no spans with it."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    async with exporting_to(collector.url)() as tracing:
        tracing.begin(each := a_push(), Headers({})).end()
        assert collector.spans == []
    assert {span.trace_id.hex() for span in collector.spans} == {each.trace_id}


@pytest.mark.anyio
async def test_a_collector_that_hangs_does_not_hold_the_router(collector, monkeypatch):
    """Its spans are given up."""
    monkeypatch.setattr("kvberth.router.otel._LONGEST_CLOSE_SECONDS", 0.1)
    collector.may_answer.clear()
    async with asyncio.timeout(5):
        async with exporting_to(collector.url)() as tracing:
            tracing.begin(a_push(), Headers({})).end()
        assert collector.spans == []
    collector.may_answer.set()
    await until(lambda: collector.spans != [])


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP/gRPC receiver."""

    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []

    def Export(self, request, _context):  # noqa: N802
        self.spans += [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_grpc_is_the_default(scheme):
    """As with vLLM, also for an address without a scheme, and without TLS then."""
    made = GrpcCollector()
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with exporting_to(f"{scheme}127.0.0.1:{port}")() as tracing:
            tracing.begin(each := a_push(), Headers({})).end()
    finally:
        server.stop(None)
    assert {span.trace_id.hex() for span in made.spans} == {each.trace_id}


@pytest.mark.anyio
async def test_a_trace_is_found_from_its_timeline(site, collector):
    """The operator's list of requests names it."""
    client = await site.router([await site.prefill()], [await site.decode()], otlp_traces_endpoint=collector.url)
    await client.text(PROMPT, x_request_id="mine-1")
    root, _ = await collector.trace()
    async with client.get("/kvberth/requests/mine-1") as response:
        said = await response.json()
    assert (said["trace_id"], said["binding"], said["error"]) == (root.trace_id.hex(), "early", None)
