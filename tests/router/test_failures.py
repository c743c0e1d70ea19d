"""Engines that fail: what the client sees, who is tried next, and what is left running."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from kvberth.router.binding import Binding
from kvberth.router.config import Mode
from kvberth.router.engine_client import EngineClient
from kvberth.router.engines import Engine
from kvberth.router.errors import FailureKind
from kvberth.router.legs import DecodeLeg

from .fakes import D_ANSWER, Site, answers, dies, half_answer, hangs, hangs_on_transfer, streams, streams_on

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
TOO_LONG = {"error": {"message": "prompt too long", "type": "BadRequestError", "param": None, "code": 400}}


async def read(response):
    return response.status, await response.json()


@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_prefill_rejects_and_the_client_hears_it_at_once(site, body):
    """P's 4xx is the answer; D, which would wait for blocks, is aborted."""
    decode = await site.decode(hangs)
    rejects = answers(TOO_LONG, 400, after=decode.arrived)
    client = await site.router([await site.prefill(rejects)], [decode])
    async with asyncio.timeout(5):
        async with client.post(body) as response:
            assert await read(response) == (400, TOO_LONG)
            assert response.headers["x-kvberth-path"] == "push"
        await decode.aborted.wait()


async def test_decode_rejects_and_prefill_is_not_left_running(site):
    """An unknown model: D's 404 passes through, P's leg ends."""
    missing = {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}
    prefill = await site.prefill(hangs)
    client = await site.router([prefill], [await site.decode(answers(missing, 404, after=prefill.arrived))])
    async with asyncio.timeout(5):
        async with client.post(PROMPT) as response:
            assert await read(response) == (404, missing)
        await prefill.aborted.wait()


@pytest.mark.parametrize("mode", Mode)
async def test_prefill_fails_and_another_one_is_tried(site, mode):
    """A second P, with a new transfer; the client sees nothing of it."""
    broken = await site.prefill(answers({"error": {}}, 500), engine_id="broken")
    params = {"do_remote_prefill": True, "remote_engine_id": "good"}
    good = await site.prefill(answers({"kv_transfer_params": params}), engine_id="good")
    decode = await site.decode(hangs_on_transfer(answers(D_ANSWER), unless_from="good"))
    client = await site.router([broken, good], [decode], mode=mode)
    for _ in range(2):  # the two take turns: one of these meets the broken one
        async with client.post(PROMPT) as response:
            assert response.status == 200
    assert len(broken.seen) >= 1
    assert len(good.seen) == 2
    ids = {seen.transfer["transfer_id"] for seen in broken.seen + good.seen}
    assert len(ids) == len(broken.seen) + len(good.seen)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_the_only_prefill_fails_and_decode_does_it_alone(site, mode, body):
    """In push D's waiting leg is aborted; a new one without a transfer answers. Header and metric tell."""
    decode = await site.decode(hangs_on_transfer(answers(D_ANSWER)))
    client = await site.router([await site.prefill(answers(b"oops", 503))], [decode], mode=mode)
    async with asyncio.timeout(5), client.post(body) as response:
        assert await read(response) == (200, D_ANSWER)
        assert response.headers["x-kvberth-path"] == "undivided"
        assert response.headers["x-kvberth-reason"] == "prefill_failed"
    assert {**decode.seen[-1].json, **body} == decode.seen[-1].json
    assert decode.seen[-1].transfer is None
    assert all(seen.was_aborted for seen in decode.seen[:-1])
    assert await client.total("kvberth_router_undivided_total", reason="prefill_failed") == 1


async def test_prefill_that_hangs_up_is_taken_out_and_looked_at_again(site):
    """A P whose connection breaks is not chosen until its health is known again."""
    prefill = await site.prefill(streams(EVENT, then=dies))
    client = await site.router([prefill], [await site.decode()], mode="pull", health_interval_seconds=60)
    async with client.post(PROMPT) as response:
        assert response.headers["x-kvberth-reason"] == "prefill_failed"
    await client.until_healthy("ok")


async def test_prefill_that_is_down_from_the_start(site):
    """No P at all: served undivided, health says degraded."""
    client = await site.router(["http://127.0.0.1:9"], [await site.decode()], wait_for="degraded")
    async with client.post(PROMPT) as response:
        assert response.status == 200
        assert response.headers["x-kvberth-path"] == "undivided"
        assert response.headers["x-kvberth-reason"] == "no_prefill_ready"


async def test_pull_without_transfer_params_is_undivided(site):
    """A P that answers without its connector's word cannot be pulled from."""
    prefill = await site.prefill(answers({"id": "p"}))
    client = await site.router([prefill], [await site.decode()], mode="pull")
    async with client.post(PROMPT) as response:
        assert response.status == 200
        assert response.headers["x-kvberth-reason"] == "no_transfer_params"


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_decode_goes_before_its_first_byte_and_another_one_answers(site, mode, body):
    """A head without a body proves nothing: the next D gets the same transfer as its next attempt; P has one leg."""
    prefill = await site.prefill()
    dying = await site.decode(streams(then=dies))
    good = await site.decode(streams(EVENT))
    client = await site.router([prefill], [dying, good], mode=mode)
    for _ in range(2):
        async with client.post(body) as response:
            assert (response.status, await response.read()) == (200, EVENT)
            assert response.headers["x-kvberth-path"] == mode
        await client.until_healthy()
    assert len(dying.seen) >= 1
    assert len(prefill.seen) == 2
    assert sum(seen.transfer.get("attempt", 0) for seen in good.seen) == len(dying.seen)
    assert await client.total("kvberth_router_retries_total", leg="decode", reason="unreachable") == len(dying.seen)


@pytest.mark.parametrize("max_retries", [0, 2])
async def test_no_more_decode_workers_are_tried_than_allowed(site, max_retries):
    """A request that kills engines does not meet all of them."""
    decodes = [await site.decode(streams(then=dies)) for _ in range(4)]
    client = await site.router([await site.prefill()], decodes, max_retries=max_retries)
    async with client.post(PROMPT) as response:
        assert response.status == 502
    assert sum(len(decode.seen) for decode in decodes) == 1 + max_retries


@pytest.mark.parametrize("behaviour", ["empty", "dies"])
@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_the_only_decode_goes_before_its_first_byte(site, behaviour, body):
    """Never an empty 200: an error that names the leg."""
    then = dies if behaviour == "dies" else None
    client = await site.router([await site.prefill()], [await site.decode(streams(then=then))])
    async with client.post(body) as response:
        status, answer = await read(response)
    assert (status, answer["error"]["code"]) == (502, "decode_failed")
    assert answer["error"]["type"] == "server_error"


async def test_an_empty_answer_is_no_answer(site):
    """A 200 without a body does not reach the client as one."""
    client = await site.router([await site.prefill()], [await site.decode(answers(b""))])
    async with client.post(PROMPT) as response:
        assert response.status == 502


async def test_no_decode_worker_is_ready(site):
    """A clear 503, and P is not troubled."""
    prefill = await site.prefill()
    client = await site.router([prefill], ["http://127.0.0.1:9"], wait_for="unavailable")
    async with client.post(PROMPT) as response:
        status, answer = await read(response)
        assert response.headers["retry-after"] == "1"
    assert (status, answer["error"]["code"]) == (503, "no_decode_worker")
    assert prefill.seen == []
    assert (await client.health())["code"] == 503


async def test_decode_that_stops_listening(site):
    """Its health was good a moment ago, its port is closed now: the other D answers."""
    good = await site.decode()
    async with AsyncExitStack() as short_life:
        leaving = await Site(short_life).decode()
        client = await site.router([await site.prefill()], [leaving, good], health_interval_seconds=60)
    for _ in range(2):
        async with client.post(PROMPT) as response:
            assert await read(response) == (200, D_ANSWER)
    assert len(good.seen) == 2
    assert leaving.seen == []


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ({"error": {"message": "boom", "type": "x", "param": None, "code": 500}}, "boom"),
        (b"Internal Server Error", "answered 500"),
        ({"detail": "no"}, "answered 500"),
    ],
)
async def test_decode_answers_5xx(site, said, heard):
    """D's error passes in OpenAI form, as it is if it has that form."""
    client = await site.router([await site.prefill()], [await site.decode(answers(said, 500))])
    async with client.post(STREAM) as response:
        status, answer = await read(response)
        assert response.headers["content-type"] == "application/json"
    assert status == 500
    assert heard in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_decode_dies_in_mid_stream(site):
    """Whole events pass, the half one does not; an error event ends the stream, and no [DONE]."""
    decode = await site.decode(streams(EVENT, EVENT + b'data: {"choi', then=dies))
    client = await site.router([await site.prefill()], [decode])
    async with client.post(STREAM) as response:
        received = await response.read()
    assert received.startswith(EVENT * 2 + b"data: ")
    error = json.loads(received.removeprefix(EVENT * 2).removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("decode_failed", "server_error")
    assert b"[DONE]" not in received
    assert await client.total("kvberth_router_broken_streams_total", path="push", binding="early") == 1


async def test_decode_dies_in_mid_answer(site):
    """A whole answer that breaks off is a 502, never half of it."""
    half = half_answer(b'{"id": "d", "choi')
    client = await site.router([await site.prefill()], [await site.decode(half)])
    async with client.post(PROMPT) as response:
        status, answer = await read(response)
    assert (status, answer["error"]["code"]) == (502, "decode_failed")


async def test_prefill_fails_after_decode_has_begun(site):
    """Once D speaks, P's leg does not matter."""
    go_on = asyncio.Event()
    decode = await site.decode(streams(EVENT, then=streams_on(EVENT, after=go_on)))
    prefill = await site.prefill(answers(b"oops", 500, after=go_on))
    client = await site.router([prefill], [decode])
    async with client.post(STREAM) as response:
        assert await response.content.readany() == EVENT
        go_on.set()
        assert await response.content.read() == EVENT


async def test_prefill_that_is_still_at_it_ends_with_the_answer(site):
    """D had all blocks itself: nobody waits for P."""
    prefill = await site.prefill(hangs)
    client = await site.router([prefill], [await site.decode(answers(D_ANSWER, after=prefill.arrived))])
    async with asyncio.timeout(5):
        async with client.post(PROMPT) as response:
            assert response.status == 200
        await prefill.aborted.wait()


async def test_an_engine_that_returns_is_used_again(site):
    """Its health decides, and it may be another engine by then."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    prefill.is_healthy = False
    await client.until_healthy("degraded")
    prefill.engine_id = "p-again"
    prefill.is_healthy = True
    await client.until_healthy("ok")
    await client.text(PROMPT)
    assert decode.seen[0].transfer["remote_engine_id"] == "p-again"


RESPONSE = {"model": "m", "input": "hi", "stream": True}
PREAMBLE = b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n"
DELTA = b"event: response.output_text.delta\ndata: {}\n\n"


async def test_a_response_that_is_only_announced_is_no_answer_yet(site):
    """Its first events come before any work: P goes on, and a D that dies behind them is replaced unseen."""
    release = asyncio.Event()
    prefill = await site.prefill(answers({}, after=release))
    dying = await site.decode(streams(PREAMBLE, then=dies))
    good = await site.decode(streams(PREAMBLE, then=streams_on(DELTA, after=release)))
    client = await site.router([prefill], [dying, good], binding=Binding.EARLY)
    asking = asyncio.ensure_future(client.text(RESPONSE, "/v1/responses"))
    async with asyncio.timeout(5):
        await good.arrived.wait()
        await asyncio.sleep(0.1)
        assert not prefill.seen[0].was_aborted
        release.set()
        assert (await asking).encode() == PREAMBLE + DELTA
    assert (len(dying.seen), len(prefill.seen)) == (1, 1)


async def test_an_engine_that_falls_silent_as_a_leg_runs_out_of_time(site):
    """The leg ends once, and is not told of the other when that comes."""
    decode, ended = await site.decode(hangs), []
    engine = Engine(decode.url)
    async with EngineClient(5) as client, asyncio.timeout(5):
        leg = DecodeLeg(
            client,
            engine,
            "/v1/completions",
            headers=[],
            body=b"{}",
            seconds=0.05,
            on_end=lambda event: (ended.append(event), engine.mark_silent("answers nobody")),
        )
        (told,) = engine.on_silent.values()
        await decode.aborted.wait()
        told()
    leg.close()
    assert [event.failure.kind for event in ended] == [FailureKind.FIRST_TOKEN_TIMEOUT]
    assert engine.on_silent == {}
