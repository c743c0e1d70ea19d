"""A stream that breaks goes on elsewhere: the bytes, and what the client sees of it."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.router.continuation import Continuation
from kvberth.router.fields import Endpoint
from kvberth.router.request import parse_request

from .events import PROMPT_IDS, data, event, whole, without_ids
from .fakes import CHAT, COMPLETIONS, D_ANSWER, answers, dies, hangs, hangs_on_transfer, streams, trickles

COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 5, "stream": True}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}


def continuation(body, **settings):
    request = parse_request(Endpoint(COMPLETIONS if "prompt" in body else CHAT), json.dumps(body).encode())
    assert request.is_continuable
    return Continuation(request, shows_ids=request.shows_token_ids, **settings)


@pytest.mark.parametrize(("endpoint", "body"), [(COMPLETIONS, COMPLETION), (CHAT, TALK)])
def test_ids_are_asked_for_and_not_shown(endpoint, body):
    """Byte for byte what an engine writes that was not asked."""
    one = continuation(body)
    events = whole(endpoint)
    assert b"".join(map(one.pass_on, events)) == without_ids(events)


def test_a_client_that_asked_for_ids_sees_them():
    """Byte for byte as well."""
    one = continuation(COMPLETION | {"return_token_ids": True})
    events = whole(COMPLETIONS)
    assert b"".join(map(one.pass_on, events)) == b"".join(events)


@pytest.mark.parametrize(("endpoint", "body"), [(COMPLETIONS, COMPLETION), (CHAT, TALK)])
@given(breaks=st.lists(st.integers(1, 4), unique=True, max_size=3).map(sorted))
def test_a_broken_stream_is_what_it_would_have_been(endpoint, body, breaks):
    """Wherever and however often it breaks: ids, times, roles and counts are those of one stream."""
    one = continuation(body)
    head = 1 if endpoint == CHAT else 0
    passed, start, prompt_ids = b"", 0, PROMPT_IDS
    for number, end in enumerate([*breaks, None]):
        events = whole(endpoint, start, created=100 + number, prompt_ids=prompt_ids)
        until = None if end is None else head + end - start
        passed += b"".join(map(one.pass_on, events[:until]))
        if end is None:
            break
        assert one.is_possible
        assert one.num_tokens == end
        asked = one.request()
        prompt_ids, start = [*PROMPT_IDS, *range(100, 100 + end)], end
        sent = json.loads(asked.decode_body(b'{"transfer_id":"t"}'))
        assert sent["max_tokens"] == 5 - end
        given_ids = sent["prompt"] if endpoint == COMPLETIONS else sent["kv_transfer_params"]["prompt_token_ids"]
        assert given_ids == prompt_ids
        assert sent["kv_transfer_params"]["transfer_id"] == "t"
        for_prefill = json.loads(asked.prefill_body(b'{"transfer_id":"t"}'))
        assert given_ids == (
            for_prefill["prompt"] if endpoint == COMPLETIONS else for_prefill["kv_transfer_params"]["prompt_token_ids"]
        )
    assert passed == without_ids(whole(endpoint))


def test_chats_ids_go_to_a_decode_worker_that_is_alone():
    """Without a transfer they are all that the engine is told."""
    one = continuation(TALK)
    for each in whole(CHAT)[:3]:
        one.pass_on(each)
    assert json.loads(one.request().decode_body(None))["kv_transfer_params"] == {
        "prompt_token_ids": [*PROMPT_IDS, 100, 101]
    }


@pytest.mark.parametrize(
    "event_",
    [
        event(COMPLETIONS, 1, ids=False),
        event(COMPLETIONS, 4),
        b'data: {"choices":[{"delta":{"reasoning":"hm"},"finish_reason":null,"token_ids":[5]}]}\n\n',
    ],
    ids=["ids not told", "finished", "reasoning"],
)
def test_what_is_not_known_is_not_continued(event_):
    """Tokens without ids, an answer at its end, and a parser's hidden state."""
    one = continuation(COMPLETION)
    one.pass_on(event(COMPLETIONS, 0, prompt_ids=PROMPT_IDS))
    assert one.is_possible
    one.pass_on(event_)
    assert not one.is_possible


def test_text_that_looks_like_ids_stays():
    """In a string a quotation mark is escaped."""
    one = continuation(COMPLETION)
    text = data({"choices": [{"text": '"token_ids":[1,2] "prompt_token_ids":[3] "finish_reason":"', "token_ids": [5]}]})
    passed = one.pass_on(text)
    assert passed == text.replace(b'"token_ids":[5]', b'"token_ids":null')
    assert one.num_tokens == 1


def test_empty_deltas_that_only_ids_bring_are_left_out():
    """An engine with a parser sends them for tokens without text; the last one of an answer stays."""
    one = continuation(TALK)
    empty = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null,"token_ids":[5]}]}\n\n'
    last = empty.replace(b"null", b'"stop"')
    assert one.pass_on(empty + last) == last.replace(b"[5]", b"null")
    assert one.num_tokens == 2


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"stop": "x"},
        {"stop": ["x"]},
        {"echo": True},
        {"logprobs": 1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"frequency_penalty": 0.5},
        {"stream": False},
        {"prompt": ["a", "b"]},
    ],
)
def test_what_cannot_go_on_elsewhere(more):
    """Its state begins with the first token, or its text hides tokens."""
    assert not parse_request(Endpoint.COMPLETIONS, json.dumps(COMPLETION | more).encode()).is_continuable


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    ],
)
def test_what_of_chats_cannot_go_on_elsewhere(more):
    """A tool call's parser has seen the beginning; ids do not hold an image."""
    assert not parse_request(Endpoint.CHAT, json.dumps(TALK | more).encode()).is_continuable


@pytest.mark.parametrize(
    "more", [{"n": 1}, {"stop": None}, {"stop": []}, {"temperature": 0.0}, {"response_format": {"type": "text"}}]
)
def test_what_can(more):
    """The usual."""
    assert parse_request(Endpoint.COMPLETIONS, json.dumps(COMPLETION | more).encode()).is_continuable


@pytest.mark.parametrize(("count", "left"), [({}, 15), ({"max_tokens": 3}, 2), ({"max_tokens": 3, "min_tokens": 2}, 2)])
def test_what_is_left_of_the_counts(count, left):
    """vLLM's default for completions is 16; a minimum shrinks as well."""
    body = {name: value for name, value in COMPLETION.items() if name != "max_tokens"} | count
    one = continuation(body)
    one.pass_on(event(COMPLETIONS, 0, prompt_ids=PROMPT_IDS))
    sent = json.loads(one.request().decode_body(None))
    assert sent["max_tokens"] == left
    assert sent.get("min_tokens", 1) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(("endpoint", "body"), [(COMPLETIONS, COMPLETION), (CHAT, TALK)])
async def test_the_client_sees_nothing_of_it(site, endpoint, body):
    """The first D dies behind two tokens, the second one goes on; timeline and metric tell."""
    head = 1 if endpoint == CHAT else 0
    dying = await site.decode(streams(*whole(endpoint)[: head + 2], then=dies))
    good = await site.decode(streams(*whole(endpoint, 2, created=200, prompt_ids=[*PROMPT_IDS, 100, 101])))
    client = await site.router([await site.prefill()], [dying, good])
    async with client.post(body, endpoint) as response:
        received = await response.read()
    assert len(dying.seen) == 1
    assert received == without_ids(whole(endpoint))
    assert good.seen[-1].json["max_tokens"] == 3
    assert await client.total("kvberth_router_continued_streams_total") == 1
    async with client.get(f"/kvberth/requests/{response.headers['x-request-id']}") as told:
        events = (await told.json())["events"]
    assert [each["facts"] for each in events if each["what"] == "continued"] == [{"tokens": 2}]
    assert [each["facts"]["kind"] for each in events if each["what"] == "leg_failed"] == ["stream_broken"]


@pytest.mark.anyio
async def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error(site):
    """The only D has died: an error event, no [DONE]."""
    dying = await site.decode(streams(*whole(COMPLETIONS)[:2], then=dies))
    client = await site.router([await site.prefill()], [dying])
    received = await client.text(COMPLETION)
    assert received.encode().startswith(without_ids(whole(COMPLETIONS)[:2]))
    assert json.loads(received.rpartition("data: ")[2])["error"]["code"] == "decode_failed"
    assert await client.total("kvberth_router_broken_streams_total") == 1
    assert await client.total("kvberth_router_continued_streams_total") == 1


@pytest.mark.anyio
async def test_streams_are_left_alone_if_one_wants(site):
    """With the setting off, nothing is asked for, and a break is an error."""
    decode = await site.decode(streams(*whole(COMPLETIONS)))
    client = await site.router([await site.prefill()], [decode], continue_streams=False)
    assert (await client.text(COMPLETION)).encode() == b"".join(whole(COMPLETIONS))
    assert "return_token_ids" not in decode.seen[0].json


@pytest.fixture
def impatient(monkeypatch):
    """An engine need not be silent for seconds."""
    monkeypatch.setattr("kvberth.router.watch._PATIENCE_SECONDS", 0.3)


@pytest.mark.anyio
@pytest.mark.parametrize("tokens", [0, 2])
async def test_decode_that_answers_nobody_is_left(site, impatient, tokens):
    """Its connection stands and nothing comes, before or behind the first byte: another one does it."""
    frozen = await site.decode(streams(*whole(COMPLETIONS)[:tokens], then=hangs), freezes_with_work=True)
    rest = whole(COMPLETIONS, tokens, prompt_ids=[*PROMPT_IDS, 100, 101][: 3 + tokens])
    good = await site.decode(streams(*rest))
    client = await site.router([await site.prefill()], [frozen, good])
    async with asyncio.timeout(10):
        assert (await client.text(COMPLETION)).encode() == without_ids(whole(COMPLETIONS))
    assert len(frozen.seen) == 1
    assert "gave no answer" in (await client.health())["decode"][0]["problem"]


@pytest.mark.anyio
async def test_prefill_that_answers_nobody_is_left(site, impatient):
    """Another prefill worker begins anew."""
    frozen = await site.prefill(hangs, freezes_with_work=True, engine_id="frozen")
    decode = await site.decode(hangs_on_transfer(answers(D_ANSWER), unless_from="good"))
    client = await site.router([frozen, await site.prefill(engine_id="good")], [decode])
    async with asyncio.timeout(10), client.post(COMPLETION | {"stream": False}) as response:
        assert await response.json() == D_ANSWER
    assert len(frozen.seen) == 1
    assert await client.total("kvberth_router_retries_total", leg="prefill", reason="silent") == 1


@pytest.mark.anyio
async def test_busy_engine_whose_health_is_late_is_not_left(site, monkeypatch):
    """Its tokens come: it answers somebody."""
    pieces, every, patience = whole(COMPLETIONS), 0.5, 1.5
    monkeypatch.setattr("kvberth.router.watch._PATIENCE_SECONDS", patience)
    assert (len(pieces) - 1) * every > patience
    busy = await site.decode(streams(*pieces[:1], then=trickles(*pieces[1:], every=every)), freezes_with_work=True)
    client = await site.router([await site.prefill()], [busy])
    async with asyncio.timeout(10):
        assert (await client.text(COMPLETION)).encode() == without_ids(whole(COMPLETIONS))
    assert await client.total("kvberth_router_continued_streams_total") == 0
