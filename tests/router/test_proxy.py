"""Requests that go well: both modes, streamed and not, and those that are served undivided."""

import asyncio
import json

import pytest

from kvberth.router.config import Mode

from .fakes import D_ANSWER, P_ANSWER, answers, streams, streams_on, until

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
EVENTS = [
    b'data: {"id":"1","choices":[{"text":"\xc3\xa9"}]}\n\n',
    b'data: {"id":"1","choices":[{"text":" b",  "logprobs":null}]}\n\n: a comment\n\n',
    b'data: {"usage":{"prompt_tokens":1}}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})]
)
async def test_an_answer_comes_from_decode(site, mode, path, body):
    """The client gets D's answer without the transfer's parameters, and learns the path."""
    prefill = await site.prefill()
    decode = await site.decode(answers(D_ANSWER | {"kv_transfer_params": {"remote_port": 1}}))
    client = await site.router([prefill], [decode], mode=mode)
    async with client.post(body, path) as response:
        assert response.status == 200
        assert await response.json() == D_ANSWER
        assert response.headers["x-kvberth-path"] == mode
        assert "x-kvberth-reason" not in response.headers
    assert [(seen.path, seen.json.get("stream")) for seen in prefill.seen] == [(path, False)]
    assert {name: decode.seen[0].json[name] for name in body} == body


@pytest.mark.parametrize("mode", Mode)
async def test_a_stream_passes_byte_for_byte(site, mode):
    """Whatever D streams reaches the client unchanged, head and tail."""
    client = await site.router([await site.prefill()], [await site.decode(streams(*EVENTS))], mode=mode)
    async with client.post(PROMPT | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert await response.read() == b"".join(EVENTS)
        assert response.headers["x-kvberth-path"] == mode


async def test_a_stream_is_passed_on_as_it_comes(site):
    """The first event is at the client while D still works on the second."""
    go_on = asyncio.Event()
    decode = await site.decode(streams(EVENTS[0], then=streams_on(EVENTS[1], after=go_on)))
    client = await site.router([await site.prefill()], [decode])
    async with client.post(PROMPT | {"stream": True}) as response:
        assert await response.content.readany() == EVENTS[0]
        go_on.set()
        assert await response.content.read() == EVENTS[1]


async def test_push_tells_decode_before_prefill_has_answered(site):
    """D can reserve and register while P computes."""
    prefill_may_end = asyncio.Event()
    prefill = await site.prefill(answers(P_ANSWER, after=prefill_may_end))
    decode = await site.decode()
    client = await site.router([prefill], [decode])
    asking = asyncio.ensure_future(client.text(PROMPT | {"n": 3}))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
        await prefill.arrived.wait()
    to_prefill, to_decode = prefill.seen[0].transfer, decode.seen[0].transfer
    assert to_prefill["transfer_id"] == to_decode["transfer_id"]
    assert to_prefill == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": to_prefill["transfer_id"],
        "attempt": 0,
        "num_consumers": 3,
        "transfer_mode": "push",
    }
    assert to_decode == to_prefill | {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_request_id": to_prefill["transfer_id"],
        "remote_host": "10.0.0.9",
        "remote_port": 14579,
        "tp_size": 1,
    }
    prefill_may_end.set()
    await asking


async def test_pull_asks_decode_when_prefill_has_answered(site):
    """D gets exactly what P's connector answered, and not before."""
    prefill_may_end = asyncio.Event()
    prefill = await site.prefill(answers(P_ANSWER, after=prefill_may_end))
    decode = await site.decode()
    client = await site.router([prefill], [decode])
    asking = asyncio.ensure_future(client.text(PROMPT, x_kvberth_mode="pull"))
    async with asyncio.timeout(5):
        await prefill.arrived.wait()
    await asyncio.sleep(0.02)
    assert decode.seen == []
    prefill_may_end.set()
    await asking
    assert prefill.seen[0].transfer["transfer_mode"] == "pull"
    assert decode.seen[0].transfer == P_ANSWER["kv_transfer_params"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo_logprobs"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
async def test_what_cannot_be_split_goes_to_decode_alone(site, fields, reason):
    """D gets the client's bytes, P gets nothing, header and metric tell."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    body = json.dumps(PROMPT | fields).encode()
    async with client.post(body) as response:
        assert response.status == 200
        assert (response.headers["x-kvberth-path"], response.headers["x-kvberth-reason"]) == ("undivided", reason)
    assert prefill.seen == []
    assert decode.seen[0].body == body
    assert await client.total("kvberth_router_undivided_total", reason=reason) == 1


async def test_a_request_id_is_kept_or_made(site):
    """The client's id, or a new one, is on the response and on both legs."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    async with client.post(PROMPT, x_request_id="mine-1") as response:
        assert response.headers.getall("x-request-id") == ["mine-1"]
    async with client.post(PROMPT) as response:
        made = response.headers["x-request-id"]
    for engine in (prefill, decode):
        assert [seen.headers["x-request-id"] for seen in engine.seen] == ["mine-1", made]


async def test_headers_pass_as_far_as_they_should(site):
    """Authorization and tracing reach both engines; what speaks of the connection does not."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    async with client.post(
        PROMPT, authorization="Bearer s", traceparent="00-1", te="trailers", accept_encoding="gzip, br"
    ) as response:
        assert response.status == 200
    for engine in (prefill, decode):
        headers = engine.seen[0].headers
        assert (headers["authorization"], headers["traceparent"]) == ("Bearer s", "00-1")
        assert "te" not in headers
        assert headers["accept-encoding"] == "identity"
        assert headers["host"] == engine.url.removeprefix("http://")
        assert int(headers["content-length"]) == len(engine.seen[0].body)


async def test_load_is_spread(site):
    """Requests in flight at the same time go to different engines of a role."""
    may_end = asyncio.Event()
    prefills = [await site.prefill(engine_id=f"p{i}") for i in range(2)]
    decodes = [await site.decode(answers(D_ANSWER, after=may_end)) for _ in range(3)]
    client = await site.router(prefills, decodes)
    asking = [asyncio.ensure_future(client.text(PROMPT)) for _ in range(6)]
    await until(lambda: sum(len(decode.seen) for decode in decodes) == 6)
    assert [len(decode.seen) for decode in decodes] == [2, 2, 2]
    assert [engine["in_flight"] for engine in (await client.health())["decode"]] == [2, 2, 2]
    may_end.set()
    await asyncio.gather(*asking)
    health = await client.health()
    assert [engine["in_flight"] for engine in health["prefill"] + health["decode"]] == [0] * 5


async def test_a_large_body_passes(site):
    """Long prompts are what this is for."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    body = PROMPT | {"prompt": "x" * 3_000_000}
    async with client.post(body) as response:
        assert response.status == 200
    assert decode.seen[0].json["prompt"] == prefill.seen[0].json["prompt"] == body["prompt"]
