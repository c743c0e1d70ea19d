"""What the `anthropic` client makes of the router's Messages API."""

import asyncio
from contextlib import asynccontextmanager

import anthropic
import pytest

from .clients import collect, in_turn, refused, retry_counts
from .events import named
from .fakes import answers, dies, hangs, streams, streams_on

pytestmark = pytest.mark.anyio

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": None}
USAGE = {"input_tokens": 3, "output_tokens": 2}
ANSWER = MESSAGE | {"content": [{"type": "text", "text": "ab"}], "stop_reason": "end_turn", "usage": USAGE}


def text(delta):
    return named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": delta}})


BEGINNING = [
    named("message_start", {"message": MESSAGE | {"content": [], "usage": USAGE | {"output_tokens": 0}}}),
    named("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    text("a"),
]
END = [
    text("b"),
    named("content_block_stop", {"index": 0}),
    named("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": USAGE}),
    named("message_stop", {}),
]


@asynccontextmanager
async def connected(router, *, max_retries=0, **settings):
    """A client as people make it, but for the number of its retries."""
    async with anthropic.AsyncAnthropic(
        base_url=router.url, **({"api_key": "none", "max_retries": max_retries} | settings)
    ) as client:
        yield client


@pytest.fixture
async def pair(site):
    """A prefill and a decode worker, to be told what to do, and their router."""
    prefill, decode = await site.prefill(), await site.decode(answers(ANSWER))
    return prefill, decode, await site.router([prefill], [decode])


@pytest.fixture
def quick_retries(monkeypatch):
    """Where the server does not say how long, the client does not wait for half a second."""
    monkeypatch.setattr("anthropic._base_client.INITIAL_RETRY_DELAY", 0.01)


async def test_message_comes_with_the_id_that_engines_saw(pair):
    """Its clients look for it in a header of their own."""
    _, decode, router = pair
    async with connected(router) as client:
        answer = await client.messages.create(**ASK)
    assert answer.content[0].text == "ab"
    assert answer._request_id == decode.seen[0].headers["x-request-id"]


async def test_stream_is_put_together(pair):
    """By the client's helper; its id is there as well."""
    _, decode, router = pair
    decode.behave = streams(*BEGINNING, *END)
    async with connected(router) as client, client.messages.stream(**ASK) as stream:
        assert [each async for each in stream.text_stream] == ["a", "b"]
        answer = await stream.get_final_message()
        assert stream.request_id == decode.seen[0].headers["x-request-id"]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 2)


@pytest.mark.parametrize("is_beta", [False, True])
async def test_tokens_are_counted(pair, is_beta):
    """By one engine; the beta API asks the same path with a query."""
    _, decode, router = pair
    decode.behave = answers({"input_tokens": 7})
    async with connected(router) as client:
        messages = client.beta.messages if is_beta else client.messages
        answer = await messages.count_tokens(model="m", messages=ASK["messages"])
    assert answer.input_tokens == 7
    assert [seen.path for seen in decode.seen] == ["/v1/messages/count_tokens"]


@pytest.mark.parametrize(
    ("status", "type_", "kind"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (404, "NotFoundError", anthropic.NotFoundError),
        (500, "api_error", anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_engines_error_is_the_clients_exception(pair, status, type_, kind, more):
    """With the engine's words, also where a stream was asked for."""
    _, decode, router = pair
    decode.behave = answers({"type": "error", "error": {"type": type_, "message": "these words"}}, status)
    async with connected(router) as client:
        with pytest.raises(kind, match="these words") as caught:
            await client.messages.create(**ASK, **more)
    assert (caught.value.status_code, caught.value.type) == (status, type_)
    assert caught.value.request_id == decode.seen[-1].headers["x-request-id"]


@pytest.mark.parametrize(
    ("settings", "request_", "kind", "type_"),
    [
        ({}, {"extra_headers": {"x-kvberth-mode": "x"}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"api_key": ("another",)}, {}, anthropic.AuthenticationError, "authentication_error"),
        ({"max_body_bytes": 10}, {}, anthropic.APIStatusError, "request_too_large"),
    ],
)
async def test_routers_refusal_is_the_clients_exception(site, settings, request_, kind, type_):
    """In the form that it reads, with an id to ask for."""
    router = await site.router([await site.prefill()], [await site.decode()], **settings)
    async with connected(router) as client:
        with pytest.raises(kind) as caught:
            await client.messages.create(**ASK, **request_)
    assert caught.value.type == type_
    assert caught.value.request_id


@pytest.mark.parametrize("credentials", [{"api_key": "one"}, {"api_key": None, "auth_token": "one"}])
async def test_clients_key_opens(site, credentials):
    """However it was given to the client, for all that it asks here."""
    decode = await site.decode(answers(ANSWER))
    router = await site.router([await site.prefill()], [decode], api_key=("one",))
    async with connected(router, **credentials) as client:
        assert (await client.messages.create(**ASK)).content[0].text == "ab"
        assert [model.id async for model in client.models.list()] == ["d"]


async def test_stream_that_breaks_raises_behind_its_text(pair):
    """What has come is the client's, then comes an exception with the reason."""
    _, decode, router = pair
    decode.behave = streams(*BEGINNING, then=dies)
    received = []
    async with connected(router) as client, client.messages.stream(**ASK) as stream:
        with pytest.raises(anthropic.APIStatusError, match="went away in the middle") as caught:
            await collect(stream.text_stream, received)
    assert received == ["a"]
    assert caught.value.type == "api_error"


async def test_stream_that_is_left_early_ends_at_the_engine(pair):
    """Behind the first text; nothing is in flight any more."""
    _, decode, router = pair
    decode.behave = streams(*BEGINNING, then=hangs)
    async with connected(router) as client:
        async with client.messages.stream(**ASK) as stream:
            async for _ in stream.text_stream:
                break
        async with asyncio.timeout(5):
            await decode.aborted.wait()
            await router.until_idle()


async def test_client_that_loses_patience_leaves_nothing(pair):
    """Its timeout ends both legs."""
    prefill, decode, router = pair
    prefill.behave = decode.behave = hangs
    async with connected(router, timeout=0.2) as client:
        with pytest.raises(anthropic.APITimeoutError):
            await client.messages.create(**ASK)
        async with asyncio.timeout(5):
            await prefill.aborted.wait()
            await decode.aborted.wait()
            await router.until_idle()


async def test_full_router_is_asked_again(site):
    """429: the second try, behind the time that Retry-After says, is answered."""
    may_end = asyncio.Event()
    decode = await site.decode(streams(*BEGINNING, then=streams_on(*END, after=may_end)))
    router = await site.router([await site.prefill()], [decode], max_in_flight=1)
    async with connected(router, max_retries=1) as client, client.messages.stream(**ASK) as first:
        second = asyncio.ensure_future(client.messages.create(**ASK, stream=True))
        await refused(router, 429)
        may_end.set()
        assert await first.get_final_text() == "ab"
        assert len([each async for each in await second]) == len(BEGINNING + END)
    assert retry_counts(decode) == ["0", "1"]


async def test_overload_is_said(site):
    """503 while no decode worker is there."""
    router = await site.router([await site.prefill()], [await site.decode(is_healthy=False)], wait_for="unavailable")
    async with connected(router) as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**ASK)
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
    assert caught.value.response.headers["retry-after"] == "1"


async def test_engine_that_failed_is_asked_again(pair, quick_retries):
    """An engine's 500 may not come twice."""
    _, decode, router = pair
    failed = {"type": "error", "error": {"type": "api_error", "message": "no"}}
    decode.behave = in_turn(answers(failed, 500), answers(ANSWER))
    async with connected(router, max_retries=1) as client:
        assert (await client.messages.create(**ASK)).content[0].text == "ab"


async def test_timeout_is_not_repeated(site):
    """504: the request has had its time, and would have it twice more."""
    prefill = await site.prefill(hangs)
    router = await site.router([prefill], [await site.decode(hangs)])
    async with connected(router, max_retries=2) as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**ASK, extra_headers={"x-kvberth-timeout-seconds": "0.1"})
    assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")
    assert retry_counts(prefill) == ["0"]
