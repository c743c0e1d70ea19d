"""Requests as a server sees them, and what becomes of each kind of answer."""

import asyncio
import hashlib
import math
import socket
import time

import numpy as np
import pytest

from kvberth.bench import PlannedRequest, Target, TargetError
from kvberth.bench.client import encode_request, send
from kvberth.bench.sending import Conversation, send_all
from kvberth.bench.target import find_model, open_session

from .fakes import (
    DONE,
    answers,
    begin,
    breaks_after,
    event,
    generates,
    in_turn,
    listening,
    streams,
    token,
    usage,
)

pytestmark = pytest.mark.anyio


def planned(index=0, arrival_seconds=0.0, output_tokens=3):
    return PlannedRequest(index, arrival_seconds, np.array([11, 12, 13, 14 + index], dtype=np.int32), output_tokens)


async def sent(behave, request=None, **settings):
    """The record of one request to a server that behaves so, and the server."""
    async with listening(behave) as server, open_session() as session:
        target = Target(url=server.url, **settings)
        outgoing = encode_request(request or planned(), target, "m")
        return (await send(session, target, outgoing, start_ns=time.perf_counter_ns())).record, server


async def test_a_good_answer():
    """Times, counts, text and our headers; the times agree with each other."""
    text = [" 11", " 12", " 13"]
    pieces = [token(each) for each in text] + [usage(4, 3), DONE]
    record, server = await sent(streams(*pieces, seconds_between=0.02, x_kvberth_path="pull", x_other="1"))
    assert (record.error, record.status) == (None, 200)
    assert (record.prompt_tokens, record.output_tokens) == (4, 3)
    assert record.text_sha256 == hashlib.sha256("".join(text).encode()).hexdigest()
    assert record.headers == {"x-kvberth-path": "pull"}
    assert len(record.itl_ms) == 2
    assert all(gap >= 15 for gap in record.itl_ms)
    assert record.ttft_ms + sum(record.itl_ms) == pytest.approx(record.e2e_ms, abs=0.01)
    assert record.tpot_ms == pytest.approx((record.e2e_ms - record.ttft_ms) / 2, abs=0.001)
    assert record.request_id == server.headers[0]["x-request-id"]


async def test_the_body_asks_for_exactly_the_tokens():
    """Token ids in, a fixed number of tokens out, streamed with usage; further fields as given."""
    _, server = await sent(generates(), extra_body={"return_token_ids": True})
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [11, 12, 13, 14],
            "max_tokens": 3,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ]


async def test_headers_are_the_user_s_and_ours():
    """Each request has an id of its own, whatever the user says."""
    _, server = await sent(generates(), headers={"X-Kvberth-Mode": "pull", "X-Request-Id": "mine"})
    assert server.headers[0]["x-kvberth-mode"] == "pull"
    assert len(server.headers[0]["x-request-id"]) == 32
    assert server.headers[0]["content-type"] == "application/json"


async def test_one_token():
    """There is no time per further token."""
    record, _ = await sent(streams(token("a"), usage(4, 1), DONE), planned(output_tokens=1))
    assert (record.error, record.tpot_ms, record.itl_ms) == (None, None, [])
    assert record.ttft_ms == record.e2e_ms


async def test_tokens_that_come_together():
    """Two tokens in one chunk are one gap less, and count for the time per token."""
    record, _ = await sent(streams(token("a"), token("bc"), usage(4, 3), DONE, seconds_between=0.02))
    assert (record.error, record.output_tokens, len(record.itl_ms)) == (None, 3, 1)
    assert record.tpot_ms == pytest.approx(record.itl_ms[0] / 2, abs=0.001)


A = token("a")
FAILURES = {
    "http": (answers(500, {"error": {"message": "no room"}}), 500, "HTTP 500: no room"),
    "redirect": (answers(307, {}), 307, "HTTP 307: {}"),
    "error object": (streams(A, event({"error": {"message": "x"}}), DONE), 200, "error in the stream: x"),
    "error object, then the end": (streams(A, event({"error": {"message": "x"}})), 200, "error in the stream: x"),
    "not json": (streams(A, event(b"<"), DONE), 200, "unreadable event: "),
    "cut": (streams(A, A, A), 200, "no [DONE] at the end of the stream: 3 of 3 tokens came"),
    "cut in an event": (streams(A, A[:20]), 200, "no [DONE] at the end of the stream: 1 of 3 tokens came"),
    "empty": (streams(), 200, "no [DONE] at the end of the stream: 0 of 3 tokens came"),
    "short": (streams(A, A, usage(4, 2), DONE), 200, "short answer: 2 of 3 tokens came"),
    "only usage": (streams(usage(4, 3), DONE), 200, "short answer: 3 of 3 tokens came"),
    "unstreamed": (answers(200, {"choices": []}), 200, "no stream: the answer is application/json"),
    "broken": (breaks_after(A), 200, "broken connection: "),
    "broken at once": (breaks_after(), None, "broken connection: Server disconnected"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_failures_have_their_reason(failure):
    """Each kind is told apart, and none has the times of a success."""
    behave, status, error = FAILURES[failure]
    record, _ = await sent(behave)
    assert record.error.startswith(error)
    assert record.status == status
    assert (record.e2e_ms, record.tpot_ms, record.text_sha256) == (None, None, None)


async def test_what_came_before_a_break_is_said():
    """How far it was, and when its first token came."""
    record, _ = await sent(breaks_after(A, A))
    assert record.error.endswith("; 2 of 3 tokens came")
    assert (record.output_tokens, len(record.itl_ms)) == (2, 1)
    assert record.ttft_ms > 0


async def test_a_request_has_its_time():
    """An answer that does not end is given up, and its connection closed."""
    record, _ = await sent(generates(seconds_per_token=5), timeout_seconds=0.1)
    assert record.error == "timeout: no whole answer in 0.1 s; 1 of 3 tokens came"


async def test_nobody_there():
    """A server that does not listen is a record too."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = Target(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        async with open_session() as session:
            record = (await send(session, target, encode_request(planned(), target, "m"), start_ns=0)).record
    assert record.error.startswith("no connection: ")
    assert record.status is None


async def test_a_slow_server_is_sent_to_in_time():
    """Open loop: requests arrive as planned although none has been answered."""
    async with listening(generates(seconds_before=0.5)) as server, open_session() as session:
        target = Target(url=server.url)
        conversations = [Conversation(encode_request(planned(index, index * 0.02), target, "m")) for index in range(10)]
        records, num_sent = [], []
        await send_all(
            session,
            target,
            "m",
            conversations,
            start_ns=time.perf_counter_ns(),
            on_sent=lambda: num_sent.append(len(records)),
            on_record=records.append,
        )
    assert num_sent == [0] * 10
    assert server.times[-1] - server.times[0] == pytest.approx(0.18, abs=0.1)
    assert all(0 <= record.late_ms < 100 for record in records)
    assert all(record.sent_s == pytest.approx(record.planned_s, abs=0.1) for record in records)
    assert all(record.e2e_ms > 450 for record in records)


async def test_lateness_is_recorded():
    """What could not be sent in time says by how much."""
    async with listening(generates()) as server, open_session() as session:
        target = Target(url=server.url)
        late_start_ns = time.perf_counter_ns() - 200_000_000
        outgoing = encode_request(planned(0, 0.1), target, "m")
        record = (await send(session, target, outgoing, start_ns=late_start_ns)).record
    assert record.late_ms == pytest.approx((record.sent_s - 0.1) * 1000, abs=0.01)
    assert record.late_ms >= 100


async def test_one_failure_leaves_the_others_alone():
    """Each request is on its own."""
    behave = in_turn(breaks_after(A), answers(503, {}), generates())
    async with listening(behave) as server, open_session() as session:
        target = Target(url=server.url)
        records = []
        await send_all(
            session,
            target,
            "m",
            [Conversation(encode_request(planned(index, index * 0.01), target, "m")) for index in range(4)],
            start_ns=time.perf_counter_ns(),
            on_sent=lambda: None,
            on_record=records.append,
        )
    assert sorted(record.failure_kind or "" for record in records) == ["", "", "HTTP 503", "broken connection"]


async def test_cancelling_ends_what_is_on_its_way():
    """The server sees its client go."""
    has_begun, was_cut = asyncio.Event(), asyncio.Event()

    async def behave(_server, request, _body):
        response = await begin(request)
        has_begun.set()
        try:
            while True:
                await response.write(A)
                await asyncio.sleep(0.01)
        except ConnectionError:
            was_cut.set()
        return response

    async with listening(behave) as server, open_session() as session:
        target = Target(url=server.url)
        conversations = [Conversation(encode_request(planned(), target, "m"))]
        now_ns = time.perf_counter_ns()
        sending = asyncio.create_task(
            send_all(
                session, target, "m", conversations, start_ns=now_ns, on_sent=lambda: None, on_record=lambda _: None
            )
        )
        await has_begun.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.wait_for(was_cut.wait(), 5)


async def test_the_model_is_asked_for():
    """The first of the list."""
    async with listening(generates()) as server, open_session() as session:
        assert await find_model(session, Target(url=server.url + "/v1/")) == "fake-model"


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{}]}, [], {"data": [{"id": 7}]}])
async def test_no_model(models):
    """A list without a name says what to do."""
    async with listening(generates(), models=models) as server, open_session() as session:
        with pytest.raises(TargetError, match="/v1/models lists no model; name one"):
            await find_model(session, Target(url=server.url))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "h:1"}, "url: 'h:1' is no server's URL, expected something like http://127.0.0.1:8000"),
        ({"timeout_seconds": 0}, "timeout_seconds: must be above 0 and finite, not 0"),
        ({"timeout_seconds": math.nan}, "timeout_seconds: must be above 0 and finite, not nan"),
        ({"headers": {"a": "b\r\nc"}}, "headers: 'a' and its value must be printable ASCII"),
        ({"headers": {"": "b"}}, "headers: '' and its value must be printable ASCII"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    """The text names the setting and what would be right."""
    with pytest.raises(ValueError, match=r".") as caught:
        Target(**{"url": "http://h"} | wrong)
    assert str(caught.value) == message
