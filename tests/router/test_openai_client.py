"""What the `openai` client makes of the router: answers, exceptions, repeated requests, and streams that are left."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import openai
import pytest

from kvberth.router import RouterConfig
from kvberth.router.server import server_settings

from .clients import collect, in_turn, refused, retry_counts
from .events import DONE, PROMPT_IDS, data, event, named, whole
from .fakes import (
    CHAT,
    COMPLETIONS,
    D_ANSWER,
    answers,
    dies,
    half_answer,
    hangs,
    streams,
    until,
)

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@asynccontextmanager
async def connected(router, *, max_retries=0, api_key="none", **settings):
    """A client as people make it, but for the number of its retries."""
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key=api_key, max_retries=max_retries, **settings
    ) as client:
        yield client


@pytest.fixture
async def pair(site):
    """A prefill and a decode worker, to be told what to do, and their router."""
    prefill, decode = await site.prefill(), await site.decode()
    return prefill, decode, await site.router([prefill], [decode])


@pytest.fixture
def quick_retries(monkeypatch):
    """Where the server does not say how long, the client does not wait for half a second."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


# Answers


async def test_request_id_is_the_one_that_engines_saw(pair):
    """The router's own, or the client's; beside the answer and with the raw response."""
    _, decode, router = pair
    async with connected(router) as client:
        answer = await client.completions.create(**PROMPT)
        assert answer._request_id == decode.seen[0].headers["x-request-id"]
        raw = await client.completions.with_raw_response.create(**PROMPT, extra_headers={"x-request-id": "mine"})
        assert raw.request_id == raw.parse()._request_id == decode.seen[1].headers["x-request-id"] == "mine"
        assert raw.headers["x-kvberth-path"] == "push"


async def test_stream_is_read_to_its_end(pair):
    """Text, finish reason and usage, twice on one connection."""
    _, decode, router = pair
    decode.behave = streams(*whole(CHAT))
    async with connected(router) as client:
        for _ in range(2):
            stream = await client.chat.completions.create(**TALK, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert "".join(choice.delta.content for chunk in chunks for choice in chunk.choices) == "abcde"
            assert chunks[-2].choices[0].finish_reason == "length"
            assert chunks[-1].usage.completion_tokens == 5
    assert decode.seen[0].json["stream_options"] == {"include_usage": True}


async def test_idle_connection_is_the_clients_to_close():
    """With as long a patience as the client's, a request could meet a connection that the router is just closing."""
    settings = server_settings(RouterConfig(decode=("http://127.0.0.1:1",)))
    assert settings["timeout_keep_alive"] > 10 * openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry


async def test_embeddings_are_relayed(pair):
    """With the encoding that the client asks for by itself; an engine's own 404 and 400 are its exceptions."""
    _, decode, router = pair
    embedding = {"object": "embedding", "index": 0, "embedding": "AACAPwAAAEA="}
    decode.behave = in_turn(
        answers({"object": "list", "model": "m", "data": [embedding], "usage": {}}),
        answers({"detail": "Not Found"}, 404),
        answers({"error": {"message": "no embedding model", "type": "BadRequestError", "code": 400}}, 400),
    )
    async with connected(router) as client:
        answer = await client.embeddings.create(model="m", input="hi")
        assert answer.data[0].embedding == [1.0, 2.0]
        assert decode.seen[0].json["encoding_format"] == "base64"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="hi")
        with pytest.raises(openai.BadRequestError, match="no embedding model"):
            await client.embeddings.create(model="m", input="hi")


async def test_models_are_listed_and_asked_for(pair):
    """One with a slash in its name is asked for by that name."""
    _, decode, router = pair
    decode.behave = answers({"id": "org/m", "object": "model", "created": 1, "owned_by": "vllm"})
    async with connected(router) as client:
        assert [model.id async for model in client.models.list()] == ["d"]
        assert (await client.models.retrieve("org/m")).id == "org/m"
    assert decode.seen[0].path == "/v1/models/org/m"


# Errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_engines_error_is_the_clients_exception(pair, status, kind, more):
    """With the engine's words, also where a stream was asked for."""
    _, decode, router = pair
    said = {"message": "these words", "type": "SomeError", "param": "prompt", "code": status}
    decode.behave = answers({"error": said}, status)
    async with connected(router) as client:
        with pytest.raises(kind, match="these words") as caught:
            await client.completions.create(**PROMPT, **more)
    error = caught.value
    assert (error.status_code, error.body) == (status, said)
    assert (error.code, error.param, error.type) == (str(status), "prompt", "SomeError")
    assert error.request_id == decode.seen[-1].headers["x-request-id"]


async def test_prefills_refusal_is_the_clients_exception(pair):
    """A prompt that is too long: the client of a stream learns it from the status."""
    prefill, decode, router = pair
    decode.behave = hangs
    said = {"message": "prompt too long", "type": "BadRequestError", "param": "input_tokens", "code": 400}
    prefill.behave = answers({"error": said}, 400)
    async with connected(router) as client:
        with pytest.raises(openai.BadRequestError, match="prompt too long") as caught:
            await client.chat.completions.create(**TALK, stream=True)
    assert caught.value.param == "input_tokens"


@pytest.mark.parametrize(
    ("settings", "request_", "kind", "code", "param"),
    [
        (
            {},
            {"extra_body": {"kv_transfer_params": {}}},
            openai.BadRequestError,
            "reserved_field",
            "kv_transfer_params",
        ),
        ({}, {"extra_headers": {"x-kvberth-mode": "x"}}, openai.BadRequestError, "invalid_mode", "x-kvberth-mode"),
        ({"api_key": ("another",)}, {}, openai.AuthenticationError, "invalid_api_key", None),
        ({"max_body_bytes": 10}, {}, openai.APIStatusError, "body_too_large", None),
    ],
)
async def test_routers_refusal_is_the_clients_exception(site, settings, request_, kind, code, param):
    """Each class of status with its code, and the parameter that is wrong."""
    router = await site.router([await site.prefill()], [await site.decode()], **settings)
    async with connected(router) as client:
        with pytest.raises(kind) as caught:
            await client.completions.create(**PROMPT, **request_)
    error = caught.value
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert error.request_id


async def test_what_is_not_stored_is_refused_in_words(pair):
    """A stored response cannot be gone on with, read, cancelled or removed; nor is there what lies below it."""
    *_, router = pair
    async with connected(router) as client:
        with pytest.raises(openai.BadRequestError, match="not stored") as caught:
            await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
        assert (caught.value.code, caught.value.param) == ("stateless", "previous_response_id")
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="not stored"):
                await ask("resp_1")
        with pytest.raises(openai.NotFoundError, match="There is no /v1/responses/resp_1/input_items here"):
            await client.responses.input_items.list("resp_1")
        with pytest.raises(openai.NotFoundError, match="There is no /v1/files here"):
            await client.files.list()


async def test_stream_that_breaks_raises_behind_its_text(pair):
    """What has come is the client's, then comes an exception with the reason."""
    _, decode, router = pair
    decode.behave = streams(*whole(COMPLETIONS)[:2], then=dies)
    received = []
    async with connected(router) as client:
        stream = await client.completions.create(**PROMPT, stream=True)
        with pytest.raises(openai.APIError, match="went away in the middle") as caught:
            await collect(stream, received)
    assert [chunk.choices[0].text for chunk in received] == ["a", "b"]
    assert (caught.value.code, caught.value.type) == ("decode_failed", "server_error")


async def test_half_an_event_is_no_broken_json(pair):
    """An engine that dies within an event: the client raises what the router says, not a decoder's error."""
    _, decode, router = pair
    decode.behave = streams(event(CHAT, 0), event(CHAT, 1)[:30], then=dies)
    async with connected(router) as client:
        stream = await client.chat.completions.create(**TALK, stream=True)
        with pytest.raises(openai.APIError, match="went away in the middle"):
            [chunk async for chunk in stream]


async def test_engines_error_within_a_stream_raises(pair):
    """In vLLM's own form, with [DONE] behind it."""
    _, decode, router = pair
    said = {"message": "out of luck", "type": "InternalServerError", "param": None, "code": 500}
    decode.behave = streams(*whole(CHAT)[:2], data({"error": said}), DONE)
    async with connected(router) as client:
        stream = await client.chat.completions.create(**TALK, stream=True)
        with pytest.raises(openai.APIError, match="out of luck") as caught:
            [chunk async for chunk in stream]
    assert caught.value.code == "500"


async def test_broken_response_raises(pair):
    """In the Responses API, also through the client's helper, which passes over events that it does not know."""
    _, decode, router = pair
    began = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [], "tools": []}
    created = named("response.created", {"sequence_number": 0, "response": began})
    decode.behave = streams(created, named("response.not.known.yet", {"sequence_number": 1}), then=dies)
    async with connected(router) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="went away in the middle") as caught:
            [each async for each in stream]
        assert caught.value.code == "decode_failed"
        async with client.responses.stream(model="m", input="hi") as stream:
            with pytest.raises(openai.APIError, match="went away in the middle"):
                [each async for each in stream]


async def test_continued_stream_is_one_to_the_clients_helper(site):
    """It puts the answer together from all chunks: one beginning, one text, one time, all tokens counted."""
    dying = await site.decode(streams(*whole(CHAT)[:3], then=dies))
    good = await site.decode(streams(*whole(CHAT, 2, created=200, prompt_ids=[*PROMPT_IDS, 100, 101])))
    router = await site.router([await site.prefill()], [dying, good])
    async with (
        connected(router) as client,
        client.chat.completions.stream(**TALK, stream_options={"include_usage": True}) as stream,
    ):
        deltas = [each.delta async for each in stream if each.type == "content.delta"]
        answer = stream.current_completion_snapshot
    assert len(dying.seen) == len(good.seen) == 1
    assert deltas == ["", *"abcde"]
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "abcde")
    assert (answer.created, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 3, 5)


# Clients that leave


async def test_stream_that_is_left_early_ends_at_the_engine(pair):
    """Behind the first chunk; nothing is in flight any more."""
    _, decode, router = pair
    decode.behave = streams(*whole(CHAT)[:2], then=hangs)
    async with connected(router) as client:
        async with await client.chat.completions.create(**TALK, stream=True) as stream:
            async for _ in stream:
                break
        async with asyncio.timeout(5):
            await decode.aborted.wait()
            await router.until_idle()
        assert await router.total("kvberth_router_client_disconnects_total", phase="decode") == 1


@pytest.mark.parametrize("leave", ["with", "close"])
async def test_stream_of_the_blocking_client_that_is_left_ends_at_the_engine(pair, leave):
    """By `with`, or by `close`."""
    _, decode, router = pair
    decode.behave = streams(*whole(CHAT)[:2], then=hangs)

    def ask(client):
        stream = client.chat.completions.create(**TALK, stream=True)
        with stream if leave == "with" else contextlib.nullcontext():
            for _ in stream:
                break
        if leave == "close":
            stream.close()

    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        await asyncio.to_thread(ask, client)
        async with asyncio.timeout(5):
            await decode.aborted.wait()
            await router.until_idle()


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_task_that_is_cancelled_ends_both_legs(pair, more):
    """While the prompt is computed."""
    prefill, decode, router = pair
    prefill.behave = decode.behave = hangs
    async with connected(router) as client:
        asking = asyncio.ensure_future(client.chat.completions.create(**TALK, **more))
        async with asyncio.timeout(5):
            await prefill.arrived.wait()
            await decode.arrived.wait()
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
            await prefill.aborted.wait()
            await decode.aborted.wait()
            await router.until_idle()


async def test_client_that_loses_patience_leaves_nothing(pair, quick_retries):
    """It gives up, and asks twice more: all of it has ended when the exception is there."""
    prefill, decode, router = pair
    prefill.behave = decode.behave = hangs
    async with connected(router, timeout=0.2, max_retries=2) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**TALK)
        async with asyncio.timeout(5):
            await router.until_idle()
            await until(lambda: all(seen.was_aborted for seen in prefill.seen + decode.seen))
    assert retry_counts(prefill) == retry_counts(decode) == ["0", "1", "2"]


async def test_client_that_loses_patience_with_a_stream_leaves_nothing(pair):
    """Its timeout counts between chunks as well, and what has begun is not asked for again."""
    _, decode, router = pair
    decode.behave = streams(*whole(CHAT)[:2], then=hangs)
    received = []
    async with connected(router, timeout=0.5, max_retries=2) as client:
        stream = await client.chat.completions.create(**TALK, stream=True)
        with pytest.raises(openai.APITimeoutError):
            await collect(stream, received)
        async with asyncio.timeout(5):
            await decode.aborted.wait()
            await router.until_idle()
    assert len(received) == 2
    assert len(decode.seen) == 1


# Requests that the client repeats


async def test_full_router_is_asked_again(site):
    """429: the second try, behind the time that Retry-After says, is answered."""
    may_end = asyncio.Event()
    decode = await site.decode(answers(D_ANSWER, after=may_end))
    router = await site.router([await site.prefill()], [decode], max_in_flight=1)
    async with connected(router, max_retries=1) as client:
        first = asyncio.ensure_future(client.completions.create(**PROMPT))
        await decode.arrived.wait()
        second = asyncio.ensure_future(client.completions.create(**PROMPT))
        await refused(router, 429)
        may_end.set()
        assert [(await each).choices[0].text for each in (first, second)] == ["hello", "hello"]
    assert retry_counts(decode) == ["0", "1"]


async def test_full_router_refuses_who_does_not_ask_again(site):
    """Without retries the exception says when to come back."""
    decode = await site.decode(hangs)
    router = await site.router([await site.prefill()], [decode], max_in_flight=1)
    async with connected(router) as client:
        first = asyncio.ensure_future(client.completions.create(**PROMPT))
        await decode.arrived.wait()
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**PROMPT)
        first.cancel()
        await asyncio.wait({first})
    error = caught.value
    assert (error.code, error.type) == ("too_many_requests", "rate_limit_error")
    assert error.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("max_retries", [0, 1])
async def test_decode_worker_that_comes_in_time_answers(site, max_retries):
    """503 and Retry-After while there is none: who asks again meets it."""
    decode = await site.decode(streams(*whole(CHAT)), is_healthy=False)
    router = await site.router([await site.prefill()], [decode], wait_for="unavailable")
    async with connected(router, max_retries=max_retries) as client:
        asking = asyncio.ensure_future(client.chat.completions.create(**TALK, stream=True))
        await refused(router, 503)
        decode.is_healthy = True
        if max_retries:
            assert len([chunk async for chunk in await asking]) == 7
            return
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (503, "no_decode_worker")


async def test_engine_that_failed_is_asked_again(pair, quick_retries):
    """502: the only decode worker went away, and may be back."""
    _, decode, router = pair
    decode.behave = in_turn(half_answer(b'{"id"'), answers(D_ANSWER))
    async with connected(router) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**PROMPT)
        assert (caught.value.status_code, caught.value.code) == (502, "decode_failed")
        decode.behave = in_turn(half_answer(b'{"id"'), answers(D_ANSWER))
        await router.until_healthy()
        answer = await client.with_options(max_retries=3).completions.create(**PROMPT)
        assert answer.choices[0].text == "hello"


async def test_request_that_kills_engines_is_not_repeated(site, quick_retries):
    """What three decode workers have died of is not shown to all others."""
    decodes = [await site.decode(half_answer(b'{"id"')) for _ in range(6)]
    router = await site.router([await site.prefill()], decodes, max_retries=2, health_interval_seconds=5)
    async with connected(router, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(**PROMPT)
    assert sum(len(decode.seen) for decode in decodes) == 3


async def test_timeout_is_not_repeated(site):
    """504: the request has had its time, and would have it twice more."""
    prefill = await site.prefill(hangs)
    router = await site.router([prefill], [await site.decode(hangs)])
    async with connected(router, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**PROMPT, extra_headers={"x-kvberth-timeout-seconds": "0.1"})
    assert (caught.value.status_code, caught.value.code) == (504, "prefill_timeout")
    assert retry_counts(prefill) == ["0"]


@pytest.mark.parametrize(("status", "says", "tries"), [(500, "false", 1), (400, "true", 2)])
async def test_engine_says_whether_to_ask_again(pair, quick_retries, status, says, tries):
    """Its `x-should-retry` passes, against what the status would mean."""
    _, decode, router = pair
    decode.behave = answers({"error": {"message": "no"}}, status, headers={"x-should-retry": says})
    async with connected(router, max_retries=1) as client:
        with pytest.raises(openai.APIStatusError, match="no"):
            await client.completions.create(**PROMPT)
    assert len(decode.seen) == tries
