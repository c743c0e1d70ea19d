"""What clients see through the router is what they see of a single engine."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.client import Client

MODES = pytest.mark.parametrize("mode", ["push", "pull"])
STORY = "The harbour master opened the book and began to read aloud what stood on the first page:"
CHAT = [{"role": "user", "content": "Name three things that one finds in a harbour."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "The tide at a harbour",
        "parameters": {
            "type": "object",
            "properties": {"harbour": {"type": "string", "enum": ["Dover", "Calais"]}},
            "required": ["harbour"],
            "additionalProperties": False,
        },
    },
}

# Fields that differ between any two answers of one engine.
_VOLATILE = {"id", "created", "system_fingerprint"}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12, "temperature": 0},
    "seeded": {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11},
    "choices": {"max_tokens": 8, "temperature": 0.9, "n": 3, "seed": 5},
    "logprobs": {"max_tokens": 5, "temperature": 0, "logprobs": 3},
    "stop": {"max_tokens": 40, "temperature": 0, "stop": [" the", "\n\n"]},
    "stop_token_ids": {
        "max_tokens": 40,
        "temperature": 0,
        "stop_token_ids": [28, 30],
        "include_stop_str_in_output": True,
    },
    "echo": {"max_tokens": 5, "temperature": 0, "echo": True},
    "echo_logprobs": {"max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1},
    "prompt_logprobs": {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 1},
    "penalties": {"max_tokens": 12, "temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "logit_bias": {"max_tokens": 5, "temperature": 0, "logit_bias": {"28": 100}},
    "one_token": {"max_tokens": 1, "temperature": 0},
    "min_tokens": {"max_tokens": 12, "min_tokens": 10, "temperature": 0},
    "token_ids": {"max_tokens": 4, "temperature": 0, "return_token_ids": True},
    "batch": {"max_tokens": 4, "temperature": 0, "prompt": [STORY, "Once upon a time", "The tide is"]},
    "structured": {"max_tokens": 12, "temperature": 0, "structured_outputs": {"choice": ["low tide", "high tide"]}},
}

CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12, "temperature": 0},
    "max_completion_tokens": {"max_completion_tokens": 7, "temperature": 0},
    "logprobs": {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    "choices": {"max_tokens": 6, "temperature": 0.8, "n": 2, "seed": 3},
    "stop": {"max_tokens": 40, "temperature": 0, "stop": [","]},
    "system": {"max_tokens": 8, "temperature": 0, "messages": [{"role": "system", "content": "Be brief."}, *CHAT]},
    "json": {"max_tokens": 20, "temperature": 0, "response_format": {"type": "json_object"}},
}


def normal(answer: httpx.Response) -> Any:
    """The answer without what differs between any two; logprobs to four digits."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.pop("kv_transfer_params", None) is None, "the handoff's parameters are not for clients"
    return _round({name: value for name, value in body.items() if name not in _VOLATILE})


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_round(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@MODES
@pytest.mark.parametrize("name", list(COMPLETIONS))
def test_completion_is_that_of_a_single_engine(router: Client, undivided: Client, mode, name):
    """Every sampling parameter passes through; usage, logprobs and choices come back."""
    body = {"prompt": STORY, **COMPLETIONS[name]}
    ours = router.post("/v1/completions", body, {"x-kvberth-mode": mode})
    assert normal(ours) == normal(undivided.post("/v1/completions", body))
    is_whole = name in {"echo_logprobs", "prompt_logprobs", "batch"}
    assert ours.headers["x-kvberth-path"] == ("undivided" if is_whole else mode)


@MODES
@pytest.mark.parametrize("name", list(CHATS))
def test_chat_is_that_of_a_single_engine(router: Client, undivided: Client, mode, name):
    """The same for chat."""
    body = {"messages": CHAT, **CHATS[name]}
    ours = router.post("/v1/chat/completions", body, {"x-kvberth-mode": mode})
    assert normal(ours) == normal(undivided.post("/v1/chat/completions", body))
    assert ours.headers["x-kvberth-path"] == mode


@dataclass
class Told:
    """What a stream tells. How many tokens come in one chunk depends on the engine's timing, and is not compared."""

    text: str = ""
    roles: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    fields: set[str] = field(default_factory=set)
    last_line: str = ""


def stream(client: Client, path: str, body: dict[str, Any], mode: str | None) -> Told:
    """All that one streamed answer tells."""
    headers = {"x-kvberth-mode": mode} if mode else {}
    request = {"model": client.model, "stream": True, **body}
    told = Told()
    with httpx.stream("POST", f"{client.url}{path}", json=request, headers=headers, timeout=300) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in filter(None, answer.iter_lines()):
            told.last_line = line
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            told.fields |= set(chunk)
            told.usage = chunk.get("usage") or told.usage
            for choice in chunk["choices"]:
                told.fields |= {f"choice.{name}" for name in choice}
                delta = choice.get("delta", {})
                told.text += choice.get("text") or delta.get("content") or ""
                told.roles += [delta["role"]] if delta.get("role") else []
                told.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return told


@MODES
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_is_that_of_a_single_engine(router: Client, undivided: Client, mode, path):
    """The same text, fields, finish reason and usage, and the same last line."""
    prompt = {"prompt": STORY} if path == "/v1/completions" else {"messages": CHAT}
    body = {**prompt, "max_tokens": 10, "temperature": 0, "stream_options": {"include_usage": True}}
    ours = stream(router, path, body, mode)
    assert ours == stream(undivided, path, body, None)
    assert ours.last_line == "data: [DONE]"
    assert ours.usage["completion_tokens"] == 10


@MODES
def test_tools_reach_the_prompt_of_both_workers(router: Client, undivided: Client, mode):
    """Tool definitions are part of the prompt: the prefill worker must see them as the decode worker does."""
    body = {"messages": CHAT, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 8, "temperature": 0}
    ours = router.post("/v1/chat/completions", body, {"x-kvberth-mode": mode})
    assert normal(ours) == normal(undivided.post("/v1/chat/completions", body))


def test_named_tool_is_called(router: Client, undivided: Client):
    """A forced tool call comes back as one, through push."""
    choice = {"type": "function", "function": {"name": "get_tide"}}
    body = {"messages": CHAT, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 80, "temperature": 0}
    ours, theirs = router.post("/v1/chat/completions", body), undivided.post("/v1/chat/completions", body)
    assert ours.status_code == theirs.status_code == 200, (ours.text, theirs.text)
    messages = [answer.json()["choices"][0]["message"] for answer in (ours, theirs)]
    (call,) = messages[0]["tool_calls"]
    assert call["function"]["name"] == "get_tide"
    assert call["function"] == messages[1]["tool_calls"][0]["function"]


@MODES
def test_openai_client_works_without_special_options(cluster, mode):
    """Models, completions, chat, streaming, errors."""
    with openai.OpenAI(
        base_url=f"{cluster.router_url}/v1", api_key="none", max_retries=0, default_headers={"x-kvberth-mode": mode}
    ) as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        answer = client.chat.completions.create(model="smollm2", messages=CHAT, max_tokens=8, temperature=0)
        assert answer.usage.completion_tokens == 8
        pieces = client.chat.completions.create(
            model="smollm2", messages=CHAT, max_tokens=8, temperature=0, stream=True
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="nonesuch"):
            client.completions.create(model="nonesuch", prompt="x")


def test_request_id_is_kept(router: Client):
    """What the client calls its request is what it gets back."""
    answer = router.post("/v1/completions", {"prompt": STORY, "max_tokens": 1}, {"X-Request-Id": "my-request"})
    assert answer.headers["x-request-id"] == "my-request"
    assert "my-request" in answer.json()["id"]
