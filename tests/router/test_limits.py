"""What is refused, how long is waited, and clients that go away."""

import asyncio
import gzip
import json
import socket
from contextlib import AsyncExitStack, contextmanager

import pytest

from kvberth.router.config import Mode

from .fakes import D_ANSWER, P_ANSWER, Site, answers, hangs, streams

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


async def error_of(client, body, **headers):
    async with client.post(body, **headers) as response:
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]
        return response.status, error["code"], error["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": "x",}', "malformed_json"),
        (b"[]", "not_an_object"),
        (b'{"prompt": "x", "kv_transfer_params": {}}', "reserved_field"),
    ],
)
async def test_a_bad_body_reaches_no_engine(site, body, code):
    """A 400 of the router's own."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    status, said, _ = await error_of(client, body)
    assert (status, said) == (400, code)
    assert prefill.seen == decode.seen == []


async def test_an_unknown_mode_is_refused(site):
    """The header takes two values, and says which."""
    client = await site.router([await site.prefill()], [await site.decode()])
    status, code, message = await error_of(client, PROMPT, x_kvberth_mode="shove")
    assert (status, code) == (400, "invalid_mode")
    assert "push, pull" in message


async def test_a_body_that_is_too_large_is_refused(site):
    """Before all of it is read."""
    client = await site.router([await site.prefill()], [await site.decode()], max_body_bytes=1000)
    assert (await error_of(client, PROMPT | {"prompt": "x" * 2000}))[:2] == (413, "body_too_large")


async def test_a_compressed_body_is_refused(site):
    """Engines do not read it either."""
    client = await site.router([await site.prefill()], [await site.decode()])
    body = gzip.compress(json.dumps(PROMPT).encode())
    assert (await error_of(client, body, content_encoding="gzip"))[:2] == (415, "unsupported_encoding")


async def test_what_is_above_the_limit_is_told_to_come_back(site):
    """429 with Retry-After; the slot is free again when its request ends."""
    may_end = asyncio.Event()
    decode = await site.decode(answers(D_ANSWER, after=may_end))
    client = await site.router([await site.prefill()], [decode], max_in_flight=1)
    asking = asyncio.ensure_future(client.text(PROMPT))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
    async with client.post(PROMPT) as response:
        assert response.status == 429
        assert response.headers["retry-after"] == "1"
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    assert await client.metric("kvberth_router_requests_in_flight") == 1
    may_end.set()
    await asking
    assert await client.text(PROMPT)
    assert await client.metric('kvberth_router_requests_total{code="429",path="none"}') == 1


@pytest.mark.parametrize(
    ("mode", "prefill", "body", "leg"),
    [
        ("push", "hangs", PROMPT, "prefill"),
        ("push", "hangs", STREAM, "prefill"),
        ("push", "answers", STREAM, "decode"),
        ("pull", "hangs", PROMPT, "prefill"),
        ("pull", "answers", STREAM, "decode"),
    ],
)
async def test_no_first_token_in_time(site, mode, prefill, body, leg):
    """A 504 that names the leg; what still runs is aborted."""
    p = await site.prefill(hangs if prefill == "hangs" else None)
    d = await site.decode(hangs)
    client = await site.router([p], [d], mode=mode, first_token_timeout_seconds=0.1)
    status, code, message = await error_of(client, body)
    assert (status, code) == (504, f"{leg}_timeout")
    assert leg in message
    async with asyncio.timeout(5):
        for engine in (p, d):
            if engine.seen and (engine is d or prefill == "hangs"):
                await engine.aborted.wait()


async def test_a_slow_prefill_leaves_decode_its_own_time(site):
    """In push D waits for P's blocks: its clock for the first token starts when P is done."""
    prefill = await site.prefill(slowly(answers(P_ANSWER), 0.3))
    decode = await site.decode(slowly(streams(EVENT), 0.6))
    client = await site.router([prefill], [decode], first_token_timeout_seconds=0.5)
    async with client.post(STREAM) as response:
        assert (response.status, await response.read()) == (200, EVENT)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("prefill_seconds", "leg"), [(0.35, "prefill"), (0.05, "decode")])
async def test_the_total_time_is_charged_to_the_leg_that_used_it(site, mode, prefill_seconds, leg):
    """A prefill that leaves decode no time is named, though decode was waited for in the end."""
    prefill = await site.prefill(slowly(answers(P_ANSWER), prefill_seconds))
    client = await site.router([prefill], [await site.decode(hangs)], mode=mode, total_timeout_seconds=0.5)
    status, code, message = await error_of(client, STREAM)
    assert (status, code) == (504, f"{leg}_timeout")
    assert "0.5 s" in message
    assert f"{leg} leg: 0." in message


async def test_a_request_has_a_deadline_of_its_own(site):
    """Asked for in a header, below the router's; engines do not see it."""
    prefill, decode = await site.prefill(), await site.decode(hangs)
    client = await site.router([prefill], [decode], total_timeout_seconds=60)
    async with asyncio.timeout(5):
        assert (await error_of(client, PROMPT, x_kvberth_timeout_seconds="0.1"))[:2] == (504, "decode_timeout")
        await decode.aborted.wait()
    assert "x-kvberth-timeout-seconds" not in decode.seen[0].headers


async def test_a_request_cannot_ask_for_more_time_than_there_is(site):
    """The router's limit counts."""
    client = await site.router([], [await site.decode(hangs)], wait_for="degraded", total_timeout_seconds=0.1)
    async with asyncio.timeout(5):
        assert (await error_of(client, PROMPT, x_kvberth_timeout_seconds="60"))[:2] == (504, "decode_timeout")


async def test_a_deadline_that_is_none_is_refused(site):
    """Before the body is read."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    assert (await error_of(client, PROMPT, x_kvberth_timeout_seconds="soon"))[:2] == (400, "invalid_timeout")


async def test_a_prefill_worker_that_does_not_connect_is_passed_over(site):
    """A connection that is not made in time costs its time, not the request."""
    async with AsyncExitStack() as short_life:
        leaving = await Site(short_life).prefill()
        client = await site.router(
            [leaving], [await site.decode()], mode="pull", health_interval_seconds=60, connect_timeout_seconds=0.1
        )
    with deaf_port(leaving.port):
        async with client.post(PROMPT) as response:
            assert response.headers["x-kvberth-reason"] == "prefill_failed"
    assert await client.total("kvberth_router_retries_total", leg="prefill", reason="connect_timeout") == 1


def slowly(behave, seconds):
    async def later(seen, send):
        await asyncio.sleep(seconds)
        await behave(seen, send)

    return later


async def test_a_long_unstreamed_answer_is_not_a_late_first_token(site):
    """An engine answers only when its last token is made."""

    async def slow(seen, send):
        await asyncio.sleep(0.3)
        await answers(D_ANSWER)(seen, send)

    client = await site.router([await site.prefill()], [await site.decode(slow)], first_token_timeout_seconds=0.1)
    async with client.post(PROMPT) as response:
        assert response.status == 200


@pytest.mark.parametrize("mode", Mode)
async def test_the_total_time_is_bounded(site, mode):
    """A 504 that names the leg that was waited for."""
    client = await site.router([await site.prefill()], [await site.decode(hangs)], mode=mode, total_timeout_seconds=0.1)
    assert (await error_of(client, PROMPT))[:2] == (504, "decode_timeout")


async def test_the_total_time_ends_a_stream(site):
    """In mid-stream the error is an event."""
    decode = await site.decode(streams(EVENT, then=hangs))
    client = await site.router([await site.prefill()], [decode], total_timeout_seconds=0.2)
    async with asyncio.timeout(5):
        async with client.post(STREAM) as response:
            received = await response.read()
        await decode.aborted.wait()
    assert received.startswith(EVENT)
    assert json.loads(received.removeprefix(EVENT + b"data: "))["error"]["code"] == "decode_timeout"


async def test_an_address_that_does_not_connect(site):
    """A connection that is not made in time is a 504 of its leg, and its engine is out until it is heard from."""
    async with AsyncExitStack() as short_life:
        leaving = await Site(short_life).decode()
        client = await site.router(
            [], [leaving], wait_for="degraded", health_interval_seconds=60, connect_timeout_seconds=0.1
        )
    with deaf_port(leaving.port):
        assert (await error_of(client, PROMPT))[:2] == (504, "decode_timeout")
        await client.until_healthy("unavailable")


@contextmanager
def deaf_port(port):
    """A port whose queue of connections is full, so that the next one is not even begun."""
    with socket.socket() as listener, socket.socket() as first:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        first.connect(("127.0.0.1", port))
        yield


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_a_client_that_goes_while_it_waits(site, mode, body):
    """Every leg that runs is aborted at once."""
    prefill, decode = await site.prefill(hangs), await site.decode(hangs)
    client = await site.router([prefill], [decode], mode=mode)
    running = [prefill, decode] if mode == "push" else [prefill]
    asking = asyncio.ensure_future(client.text(body))
    async with asyncio.timeout(1):
        for engine in running:
            await engine.arrived.wait()
        asking.cancel()
        for engine in running:
            await engine.aborted.wait()
    await client.until_idle()
    assert await client.total("kvberth_router_client_disconnects_total", path=mode, phase="prefill") == 1
    assert await client.metric(f'kvberth_router_requests_total{{code="499",path="{mode}"}}') == 1


@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_a_client_that_goes_while_decode_works_after_prefill(site, body):
    """The decode leg of a pull is aborted too."""
    decode = await site.decode(hangs)
    client = await site.router([await site.prefill()], [decode], mode="pull")
    asking = asyncio.ensure_future(client.text(body))
    async with asyncio.timeout(1):
        await decode.arrived.wait()
        asking.cancel()
        await decode.aborted.wait()


async def test_a_client_that_goes_in_mid_stream(site):
    """D stops, and so does a P that is still at it."""
    prefill, decode = await site.prefill(hangs), await site.decode(streams(EVENT, then=hangs))
    client = await site.router([prefill], [decode])
    async with asyncio.timeout(1):
        async with client.post(STREAM) as response:
            assert await response.content.readany() == EVENT
            await prefill.arrived.wait()
        await decode.aborted.wait()
        await prefill.aborted.wait()
    await client.until_idle()
    assert await client.total("kvberth_router_client_disconnects_total", phase="decode") == 1
