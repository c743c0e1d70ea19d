"""The router's own metrics: each request is in them once, with what it was."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvberth.router.binding import Binding
from kvberth.router.config import Mode
from kvberth.router.fleet import Fleet
from kvberth.router.metrics import Metrics
from kvberth.router.timeline import CLIENT_STALLED, What

from .fakes import dies, streams, streams_on
from .timelines import a_push, bound, failed, noted, retried, timeline, to_decode

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
TOKEN = b'data: {"id":"1","choices":[{"text":" b"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def line(name, **labels):
    return name, frozenset(labels.items())


def page(*timelines):
    """The lines of a router that has served these; buckets and what has no labels left out."""
    metrics = Metrics(Fleet(), lambda: 0, lambda: 0)
    for each in timelines:
        metrics.observe(each)
    return {
        line(sample.name.removeprefix("kvberth_router_"), **sample.labels): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.labels and not sample.name.endswith(("_bucket", "_created"))
    }


def test_a_push_is_in_every_histogram():
    """By its path and its binding."""
    assert page(a_push()) == {line("requests_total", path="push", code="200"): 1.0} | {
        line(f"{name}_{kind}", path="push", binding="early"): value
        for name, seconds in {
            "time_to_first_token_seconds": 2.0,
            "time_per_output_token_seconds": 0.25,
            "e2e_latency_seconds": 3.0,
            "admission_wait_seconds": 0.125,
            "queue_seconds": 0.5,
            "bind_seconds": 0.5,
            "prefill_seconds": 1.0,
            "transfer_seconds": 0.125,
        }.items()
        for kind, value in (("sum", seconds), ("count", 1.0))
    }


def test_what_is_not_known_is_in_no_histogram():
    """A request that was refused at once has waited for nothing."""
    refused = timeline(ends_at=0, path="none", status=429, error="too_many_requests")
    assert page(refused) == {line("requests_total", path="none", code="429"): 1.0}


def test_failures_are_counted_by_what_became_of_them():
    """Hidden ones, broken and continued streams; all of them by path and binding."""
    counted = page(
        timeline(
            bound(0.1, "jit"),
            to_decode(0.2),
            noted(0.3, What.FIRST_TOKEN),
            failed(0.4, "decode", "stream_broken"),
            noted(0.4, What.CONTINUED, tokens=3),
            failed(0.5, "decode"),
            retried(0.5, "decode"),
            noted(0.6, What.FIRST_TOKEN),
            failed(0.7, "decode", "stream_broken"),
            ends_at=1.0,
            error="decode_failed",
        )
    )
    of_failures = ("retries_total", "continued_streams_total", "broken_streams_total")
    by = {"path": "push", "binding": "jit"}
    assert {each: value for each, value in counted.items() if each[0] in of_failures} == {
        line("retries_total", **by, leg="decode", reason="unreachable"): 1.0,
        line("continued_streams_total", **by): 1.0,
        line("broken_streams_total", **by): 1.0,
    }


def test_a_client_that_stalls_is_one_that_went():
    """The second counter says how many of the first they are."""
    counted = page(timeline(to_decode(0.2), ends_at=1.0, path="undivided", status=499, error=CLIENT_STALLED))
    by = {"path": "undivided", "binding": "none"}
    assert counted[line("client_disconnects_total", **by, phase="prefill")] == 1.0
    assert counted[line("client_stalls_total", **by)] == 1.0
    assert line("broken_streams_total", **by) not in counted


def test_times_between_chunks_are_a_histogram():
    """Its buckets count upwards, and the last one holds all."""
    metrics = Metrics(Fleet(), lambda: 0, lambda: 0)
    for seconds in (0.002, 0.002, 0.3, 100):
        metrics.gaps("push", "late").add(seconds)
    (family,) = (
        family
        for family in text_string_to_metric_families(metrics.text().decode())
        if family.name == "kvberth_router_inter_token_latency_seconds"
    )
    assert family.type == "histogram"
    assert all(sample.labels.items() >= {"path": "push", "binding": "late"}.items() for sample in family.samples)
    by_bound = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert (by_bound["0.001"], by_bound["0.0025"], by_bound["0.2"], by_bound["0.4"], by_bound["+Inf"]) == (
        0,
        2,
        2,
        3,
        4,
    )
    assert [s.value for s in family.samples if s.name.endswith(("_count", "_sum"))] == [4, pytest.approx(100.304)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("mode", "binding", "counted_as"),
    [(Mode.PUSH, Binding.EARLY, "early"), (Mode.PUSH, Binding.JIT, "jit"), (Mode.PULL, Binding.EARLY, "late")],
)
async def test_a_stream_is_measured(site, mode, binding, counted_as):
    """First token, tokens behind it, gaps and the whole, under the binding that it really had."""
    client = await site.router([await site.prefill()], [await site.decode(streams(TOKEN, TOKEN, TOKEN, DONE))])
    await client.text(STREAM, x_kvberth_mode=mode, x_kvberth_binding=binding)
    labels = {"path": mode, "binding": counted_as}
    for name in ("time_to_first_token", "time_per_output_token", "e2e_latency", "queue", "admission_wait"):
        assert await client.total(f"kvberth_router_{name}_seconds_count", **labels) == 1, name
    assert await client.total("kvberth_router_requests_total", path=mode, code="200") == 1


@pytest.mark.anyio
async def test_gaps_are_seen_while_a_stream_runs(site):
    """A stream of an hour is not a surprise at its end."""
    go_on = asyncio.Event()
    decode = await site.decode(streams(TOKEN, then=streams_on(TOKEN, after=go_on)))
    client = await site.router([await site.prefill()], [decode])
    async with client.post(STREAM) as response:
        await response.content.readany()
        go_on.set()
        await response.content.readany()
        count = 'kvberth_router_inter_token_latency_seconds_count{binding="early",path="push"}'
        assert await client.metric(count) == 1


@pytest.mark.anyio
async def test_a_continued_stream_is_one_request(site):
    """Its tokens are those of both engines, and what the client waited for between them is a gap."""
    events = [
        b'data: {"id":"1","created":1,"choices":[{"index":0,"text":" a","token_ids":[%d],"prompt_token_ids":[9],'
        b'"finish_reason":null}]}\n\n' % number
        for number in (1, 2)
    ]
    dying = await site.decode(streams(events[0], then=dies), engine_id="d1")
    client = await site.router([await site.prefill()], [dying])
    other = await site.decode(streams(events[1], DONE), engine_id="d2")
    async with client.admin("POST", "/kvberth/engines", {"url": other.url, "role": "decode"}) as added:
        assert added.status == 201
    await client.until_engine(other, ready=True)
    text = ""
    while not dying.seen:
        text = await client.text(STREAM)
    assert text.count(" a") == 2
    assert await client.total("kvberth_router_continued_streams_total", path="push", binding="early") == 1
    assert await client.total("kvberth_router_broken_streams_total") == 0


@pytest.mark.anyio
async def test_relayed_requests_are_among_the_requests(site):
    """They have a latency, and neither prefill nor tokens."""
    client = await site.router([await site.prefill()], [await site.decode()])
    await client.text(PROMPT, "/tokenize")
    assert await client.total("kvberth_router_e2e_latency_seconds_count", path="relayed", binding="none") == 1
    assert await client.total("kvberth_router_prefill_seconds_count") == 0
