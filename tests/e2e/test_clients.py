"""The `openai` and `anthropic` clients as people use them, with real engines behind the router."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from tests.e2e.client import assert_nothing_left, wait_until_dispatched
from tests.e2e.test_api import CHAT, MODES, WEATHER

from kvberth.launch import LocalCluster

TALK: dict[str, Any] = {"model": "smollm2", "messages": CHAT, "temperature": 0, "max_tokens": 8}
TOO_LONG: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "tide " * 5000}]}
LONG: dict[str, Any] = TALK | {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
# Anthropic's client has no argument for the temperature any more.
MESSAGE: dict[str, Any] = {"model": "smollm2", "messages": CHAT, "extra_body": {"temperature": 0}}
TIDE_TOOL: dict[str, Any] = {
    "name": "get_tide",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


class Tide(pydantic.BaseModel):
    """What the model is made to answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    level: Literal["low", "high"]


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    """The blocking client; nothing of what it asked is left at the engines."""
    with openai.OpenAI(base_url=f"{cluster.router_url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert_nothing_left(cluster)


@pytest.fixture
def claude(cluster: LocalCluster) -> Iterator[anthropic.Anthropic]:
    """The same for Anthropic's."""
    with anthropic.Anthropic(base_url=cluster.router_url, api_key="none", max_retries=0) as client:
        yield client
    assert_nothing_left(cluster)


def push_or_pull(mode: str) -> dict[str, Any]:
    return {"extra_headers": {"x-kvberth-mode": mode}}


@MODES
def test_chat_streams_what_it_says(client, mode):
    """The helper puts the chunks together to the unstreamed answer, usage included."""
    said = client.chat.completions.create(**TALK, **push_or_pull(mode))
    with client.chat.completions.stream(**TALK, stream_options={"include_usage": True}, **push_or_pull(mode)) as stream:
        text = "".join(each.delta for each in stream if each.type == "content.delta")
        streamed = stream.current_completion_snapshot
    assert said.choices[0].message.content == streamed.choices[0].message.content == text
    assert said.choices[0].finish_reason == streamed.choices[0].finish_reason == "length"
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (streamed.usage.prompt_tokens, 8)
    assert said._request_id in said.id


@MODES
def test_two_choices_stream_side_by_side(client, mode):
    """Each is what its number says in the unstreamed answer, with the logprobs of its tokens."""
    body = TALK | {"n": 2, "seed": 3, "temperature": 0.8, "logprobs": True, "top_logprobs": 1}
    said = client.chat.completions.create(**body, **push_or_pull(mode))
    with client.chat.completions.stream(**body, **push_or_pull(mode)) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    for one, other in zip(said.choices, streamed.choices, strict=True):
        assert (one.index, one.message.content) == (other.index, other.message.content)
        assert [each.token for each in one.logprobs.content] == [each.token for each in other.logprobs.content]
        assert len(one.logprobs.content) == 8


def test_completion_streams_what_it_says(client):
    """The older API, with logprobs."""
    body = {"model": "smollm2", "prompt": "The tide is", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    said = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == said.choices[0].text
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert tokens == said.choices[0].logprobs.tokens


def test_answer_is_parsed_into_a_class(client):
    """`parse` sends a JSON schema, and the answer keeps to it; so does the stream's helper."""
    body = TALK | {"max_tokens": 40, "response_format": Tide}
    answer = client.chat.completions.parse(**body)
    assert isinstance(answer.choices[0].message.parsed, Tide)
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_named_tool_is_called(client):
    """Whole and streamed: the arguments are JSON of the tool's schema."""
    body = TALK | {
        "max_tokens": 80,
        "tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "get_tide"}},
    }
    (called,) = client.chat.completions.create(**body).choices[0].message.tool_calls
    with client.chat.completions.stream(**body) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert called.function.name == streamed.function.name == "get_tide"
    assert json.loads(called.function.arguments) == json.loads(streamed.function.arguments)
    assert json.loads(called.function.arguments)["harbour"] in {"Dover", "Calais"}


@MODES
def test_response_streams_what_it_says(client, mode):
    """The Responses API through its helper, and what is not stored is refused in words."""
    body = {"model": "smollm2", "input": CHAT[0]["content"], "temperature": 0, "max_output_tokens": 16}
    said = client.responses.create(**body, **push_or_pull(mode))
    with client.responses.stream(**body, **push_or_pull(mode)) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
    assert said.output_text == text
    assert said.output_text
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(**body, previous_response_id=said.id)


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
def test_engines_refusal_is_an_exception(client, more):
    """A prompt that is too long and a model that is not there; endpoints that the engine does not serve."""
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.chat.completions.create(**TOO_LONG, **more)
    assert caught.value.code == "400"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError, match="nonesuch"):
        client.chat.completions.create(**TALK | {"model": "nonesuch"}, **more)
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        client.embeddings.create(model="smollm2", input="hi")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("smollm2")  # vLLM lists its models, and tells no more of one


@MODES
def test_stream_that_is_left_leaves_nothing(client, mode):
    """Behind the first words of thousands; see what the fixture asks at the end."""
    with client.chat.completions.create(**LONG, stream=True, **push_or_pull(mode)) as stream:
        assert next(stream).choices
        assert next(stream).choices


@MODES
def test_task_that_is_cancelled_leaves_nothing(cluster, mode):
    """The asynchronous client's, while tokens are made for an unstreamed answer."""

    async def ask_and_cancel() -> None:
        async with openai.AsyncOpenAI(base_url=f"{cluster.router_url}/v1", api_key="none") as client:
            asking = asyncio.create_task(client.chat.completions.create(**LONG, **push_or_pull(mode)))
            await asyncio.to_thread(wait_until_dispatched, cluster, "decode")
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()

    asyncio.run(ask_and_cancel())
    assert_nothing_left(cluster)


def test_client_that_loses_patience_leaves_nothing(client):
    """It asks once more, and gives up twice."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1, max_retries=1).chat.completions.create(**LONG)


@MODES
def test_message_streams_what_it_says(claude, mode):
    """Anthropic's API; what it counts is what it was counted to be."""
    body = MESSAGE | {"max_tokens": 8}
    said = claude.messages.create(**body, **push_or_pull(mode))
    with claude.messages.stream(**body, **push_or_pull(mode)) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert said.content[0].text == text == streamed.content[0].text
    assert said.stop_reason == streamed.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="smollm2", messages=CHAT)
    assert said.usage.input_tokens == streamed.usage.input_tokens == counted.input_tokens
    assert said._request_id


def test_refused_message_is_an_exception(claude):
    """In the form that this client reads, whoever refuses: an engine or the router."""
    with pytest.raises(anthropic.NotFoundError, match="nonesuch") as caught:
        claude.messages.create(model="nonesuch", messages=CHAT, max_tokens=8)
    assert caught.value.type
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        claude.messages.create(**TOO_LONG, max_tokens=8)
    with pytest.raises(anthropic.BadRequestError, match="one of push, pull") as caught:
        claude.messages.create(**TOO_LONG, max_tokens=8, **push_or_pull("shove"))
    assert caught.value.type == "invalid_request_error"


def test_message_that_is_left_leaves_nothing(claude):
    """Behind the first words."""
    with claude.messages.stream(**MESSAGE | {"max_tokens": 3000}) as stream:
        next(iter(stream.text_stream))
