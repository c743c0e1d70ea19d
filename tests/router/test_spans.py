"""Timelines as spans: what a trace shows of a request."""

from kvberth.router.spans import Span, children, root, root_attributes
from kvberth.router.timeline import CLIENT_WENT_AWAY, Event, What

from .timelines import a_push, admitted, bound, failed, noted, retried, timeline, to_decode, to_prefill

TRANSFER = {"kvberth.transfer_id": "t-1"}
PREFILL = {"server.address": "p", "server.port": 1, "kvberth.engine.reason": "the only one"} | TRANSFER
DECODE = {"server.address": "d", "server.port": 2, "kvberth.engine.reason": "most free KV"}


def outline(each):
    """Names and times of the legs and what lies between them, and how they ended."""
    return [
        (span.name, span.begin, span.end, span.error or bool(span.attributes.get("kvberth.aborted"))) for span in each
    ]


def test_a_push_of_which_all_is_known():
    """Both legs, and between their events what the time went into."""
    first_token = Event(2.0, What.FIRST_TOKEN, {})
    assert children(a_push()) == [
        Span("queue", 0.0, 0.5),
        Span("prefill", 0.25, 1.5, PREFILL, (Event(0.5, What.PREFILL_BEGAN, {}),), is_leg=True),
        Span("decode", 0.25, 3.5, DECODE | TRANSFER | {"kvberth.attempt": 0}, (first_token,), is_leg=True),
        Span("bind", 0.25, 0.75, TRANSFER),
        Span("transfer", 1.5, 1.625, TRANSFER),
    ]


def test_the_root_says_what_became_of_the_request():
    """In the words of the conventions where they have any."""
    assert root(a_push()) == Span(
        "POST /v1/completions",
        0.0,
        3.5,
        {
            "http.response.status_code": 200,
            "gen_ai.request.model": "m",
            "gen_ai.request.stream": True,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.time_to_first_chunk": 2.0,
            "kvberth.mode": "push",
            "kvberth.path": "push",
            "kvberth.binding": "early",
            "kvberth.binding.reason": "as asked for",
        },
    )


def test_what_is_known_at_the_arrival():
    """A sampler may decide by it."""
    assert root_attributes(a_push()) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "kvberth.request_id": "r-1",
    }


def test_legs_are_in_the_order_in_which_they_were_sent():
    """Both of a try at one instant, and all tries: whoever began a span for each of them finds it again."""
    each = timeline(
        to_prefill(0.5, "http://p1:1", "t-1"),
        to_decode(0.5, "http://d1:2"),
        failed(1.0, "prefill"),
        retried(1.0, "prefill"),
        to_prefill(1.0, "http://p2:1", "t-2"),
        to_decode(1.0, "http://d2:2"),
        noted(2.0, What.PREFILL_DONE),
        ends_at=3.0,
    )
    legs = [span for span in children(each) if span.is_leg]
    assert outline(legs) == [
        ("prefill", 0.5, 1.0, "unreachable"),
        ("decode", 0.5, 1.0, True),
        ("prefill", 1.0, 2.0, False),
        ("decode", 1.0, 3.0, False),
    ]
    assert [span.attributes["server.address"] for span in legs] == ["p1", "d1", "p2", "d2"]
    assert [span.attributes["kvberth.transfer_id"] for span in legs] == ["t-1", "t-1", "t-2", "t-2"]
    assert legs[0].attributes["error.type"] == "unreachable"
    assert legs[0].description == "the prefill worker is gone"


def test_a_decode_worker_that_is_replaced_was_aborted():
    """It was behind; the transfer goes on as its next attempt."""
    each = timeline(
        to_prefill(0.0),
        to_decode(0.0),
        noted(0.5, What.PREFILL_DONE),
        retried(1.0, "decode", "behind"),
        to_decode(1.0, attempt=1),
        ends_at=2.0,
    )
    legs = [span for span in children(each) if span.name == "decode"]
    assert outline(legs) == [("decode", 0.0, 1.0, True), ("decode", 1.0, 2.0, False)]
    assert [span.attributes["kvberth.attempt"] for span in legs] == [0, 1]


def test_a_prefill_that_was_in_vain_ends_with_the_first_token():
    """The decode worker had all of the prompt already."""
    each = timeline(to_prefill(0.0), to_decode(0.0), noted(0.5, What.FIRST_TOKEN), ends_at=2.0)
    assert outline(children(each))[1:] == [("prefill", 0.0, 0.5, True), ("decode", 0.0, 2.0, False)]


def test_a_client_that_goes_aborts_both_legs():
    """That is nobody's failure."""
    each = timeline(to_prefill(0.0), to_decode(0.0), ends_at=2.0, status=499, error=CLIENT_WENT_AWAY)
    assert outline(children(each))[1:] == [("prefill", 0.0, 2.0, True), ("decode", 0.0, 2.0, True)]
    assert root(each).error is None
    assert root(each).attributes["error.type"] == CLIENT_WENT_AWAY


def test_an_undivided_request_has_no_transfer():
    """Neither the failed one before it."""
    each = timeline(
        to_prefill(0.0),
        failed(0.5, "prefill"),
        noted(0.5, What.LEFT_UNDIVIDED, reason="prefill_failed"),
        to_decode(0.5),
        ends_at=2.0,
        path="undivided",
    )
    assert children(each)[-1] == Span("decode", 0.5, 2.0, DECODE, is_leg=True)
    assert [event.what for event in root(each).events] == [What.LEFT_UNDIVIDED]


def test_a_relayed_request_has_one_leg():
    """It is neither prefill nor decode."""
    each = timeline(noted(0.25, What.DECODE_SENT, engine="http://d:2"), ends_at=1.0, path="relayed")
    assert outline(children(each)) == [("queue", 0.0, 0.25, False), ("relay", 0.25, 1.0, False)]


def test_failures_that_are_the_router_s_or_an_engine_s_are_errors():
    """A 5xx, and a stream that ends with an error though it began with 200; a client's mistake is none."""
    for status, error, is_error in [
        (503, "no_decode_worker", True),
        (500, None, True),
        (429, "too_many_requests", False),
    ]:
        each = root(timeline(ends_at=1.0, path="none", status=status, error=error))
        assert (each.error is not None, each.attributes["error.type"]) == (is_error, error or str(status))
    broken = timeline(to_decode(0.0), noted(0.5, What.FIRST_TOKEN), ends_at=1.0, error="decode_failed")
    assert root(broken).error == "decode_failed"


def test_a_stream_that_goes_on_elsewhere_shows_both_engines():
    """The first leg failed, the request did not."""
    each = timeline(
        admitted(0.0),
        bound(0.0),
        to_decode(0.0),
        noted(0.5, What.FIRST_TOKEN),
        failed(1.0, "decode", "stream_broken"),
        noted(1.0, What.CONTINUED, tokens=3),
        to_decode(1.0, "http://d2:2"),
        noted(1.5, What.FIRST_TOKEN),
        ends_at=2.0,
    )
    assert outline(children(each))[1:] == [("decode", 0.0, 1.0, "stream_broken"), ("decode", 1.0, 2.0, False)]
    assert root(each).events == (Event(1.0, What.CONTINUED, {"tokens": 3}),)
    assert root(each).error is None
