"""From a client's body to the legs' bodies."""

import json

import msgspec
import pytest

from kvberth.router.errors import RouterError
from kvberth.router.fields import Endpoint
from kvberth.router.request import (
    estimated_prompt_tokens,
    parse_request,
    take_transfer_params,
    without_transfer_params,
)


def parse(body, endpoint=Endpoint.COMPLETIONS):
    return parse_request(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"a": 1,}', "byte 8"),
        (b'{"a"', "truncated"),
        (b"", "truncated"),
        (b'{"a": {"b": nope}}', "byte 13"),
        (b'{"a":' + b"[" * 100_000, "recursion"),
        (b'{"a\xff": 1}', "UTF-8"),
    ],
)
def test_malformed_json_says_where(body, where):
    """A body that is no JSON is a 400 that tells where it breaks."""
    with pytest.raises(RouterError, match=where) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "malformed_json")


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"null", b"7"])
def test_what_is_no_object_is_refused(body):
    """JSON that is not an object is a 400 of its own."""
    with pytest.raises(RouterError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "not_an_object")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "kv_transfer_params": null}',
        b'{"prompt": "x", "kv_transfer_par\\u0061ms": {"do_remote_prefill": true}}',
        b'{"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}',
    ],
)
def test_the_transfer_is_the_routers(body):
    """A client cannot name the peer of a transfer, by no spelling and no side door."""
    with pytest.raises(RouterError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "reserved_field",
        "kv_transfer_params",
    )


def test_decode_body_is_the_clients_own_bytes():
    """D's body is what the client wrote, to the byte, behind one more field."""
    body = b' { "prompt" : "caf\\u00e9",  "seed":1, "unknown": [1.50] }'
    request = parse(body)
    assert (
        request.decode_body(b'{"x":1}')
        == b'{"kv_transfer_params":{"x":1}, "prompt" : "caf\\u00e9",  "seed":1, "unknown": [1.50] }'
    )
    assert request.decode_body(None) == body


def test_decode_body_of_an_empty_object():
    """An object without fields stays valid JSON."""
    assert json.loads(parse(b"{ }").decode_body(b"{}")) == {"kv_transfer_params": {}}


SHAPE_THE_PROMPT = {
    "model": "lora-7",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "high",
    "include_reasoning": False,
    "documents": [{"title": "t", "text": "x"}],
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "cache_salt": "s",
    "priority": 3,
    "user": "u",
    "session_id": "s",
    "request_id": "r",
    "vllm_xargs": {"a": 1},
    "some_future_field": 1.5,
}
FOR_DECODE_ONLY = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "best_of": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "stop": ["\n"],
    "stop_token_ids": [1],
    "min_tokens": 10,
    "ignore_eos": True,
    "structured_outputs": {"regex": "a+"},
    "guided_json": {},
    "logit_bias": {"5": 1},
    "bad_words": ["x"],
    "seed": 1,
    "temperature": 0.5,
    "thinking_token_budget": 5,
    "return_token_ids": True,
}


def test_prefill_body_keeps_what_can_shape_the_prompt():
    """P renders the same prompt as D: everything that a renderer reads is there, and what nobody knows yet."""
    request = parse(SHAPE_THE_PROMPT | FOR_DECODE_ONLY | {"max_tokens": 99}, Endpoint.CHAT)
    assert json.loads(request.prefill_body(b'{"x":1}')) == SHAPE_THE_PROMPT | {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"x": 1},
    }


def test_prefill_body_of_a_completion_has_no_chat_field():
    """`max_completion_tokens` is a field of chat only, and a format is no part of a prompt that is given as it is."""
    request = parse({"prompt": [1, 2], "suffix": "s", "max_tokens": 5, "response_format": {"type": "json_object"}})
    assert json.loads(request.prefill_body(b"{}")) == {
        "prompt": [1, 2],
        "suffix": "s",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {},
    }


@pytest.mark.parametrize(("n", "consumers"), [(None, 1), (1, 1), (4, 4)])
def test_n_is_the_number_of_consumers(n, consumers):
    """Each of the `n` answers loads the prompt's KV."""
    request = parse({"prompt": "x", "n": n})
    assert (request.num_consumers, request.obstacle) == (consumers, None)


@pytest.mark.parametrize("n", ["2", 0, -1, 2.0, True, [2], 10**12])
def test_an_n_that_is_no_count_is_left_to_decode(n):
    """What `n` means then is the engine's to say: the request goes there whole."""
    assert parse({"prompt": "x", "n": n}).obstacle == "n_not_a_count"


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": ["x"]}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": [[1, 2, 3]]}, None),
        ({"prompt": []}, None),
        ({"prompt": ["x", "y"]}, "several_prompts"),
        ({"prompt": [[1], [2]]}, "several_prompts"),
        ({"prompt": "x", "prompt_embeds": "b64"}, "several_prompts"),
        ({"prompt_embeds": ["a", "b"]}, "several_prompts"),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": None}, None),
        ({"prompt": "x", "use_beam_search": True}, "beam_search"),
        ({"prompt": "x", "use_beam_search": "true"}, "beam_search"),
        ({"prompt": "x", "use_beam_search": False}, None),
        ({"prompt": "x", "echo": True}, None),
        ({"prompt": "x", "logprobs": 1}, None),
        ({"prompt": "x", "echo": True, "logprobs": 0}, "echo_logprobs"),
        ({"prompt": "x", "echo": False, "logprobs": 1}, None),
        ({"prompt": "x", "truncate_prompt_tokens": 100}, None),
        ({"prompt": "x", "truncate_prompt_tokens": None}, None),
        ({"prompt": "x", "truncate_prompt_tokens": -1}, "truncation"),
        ({"prompt": "x", "truncate_prompt_tokens": "-1"}, "truncation"),
    ],
)
def test_what_cannot_be_split(fields, obstacle):
    """A request that needs the prompt's own logits, or is several requests, goes to D alone, and the reason is told."""
    assert parse(fields).obstacle == obstacle


def test_prefill_body_of_a_response():
    """One token, nothing stored; what a template may read stays."""
    kept = {"input": "hi", "instructions": "be brief", "text": {"format": {"type": "text"}}, "reasoning": {}}
    dropped = {"include": [], "metadata": {"a": "b"}, "max_tool_calls": 2, "background": False, "top_logprobs": 1}
    request = parse(kept | dropped | {"max_output_tokens": 50, "stream": True, "store": True}, Endpoint.RESPONSES)
    assert json.loads(request.prefill_body(b"{}")) == kept | {
        "max_output_tokens": 1,
        "store": False,
        "stream": False,
        "kv_transfer_params": {},
    }


def test_prefill_body_of_a_message():
    """One token; thinking and tools shape the prompt."""
    kept = {"messages": [], "system": "s", "tools": [], "thinking": {"type": "enabled", "budget_tokens": 2000}}
    request = parse(kept | {"max_tokens": 50, "stop_sequences": ["x"], "metadata": {}}, Endpoint.MESSAGES)
    assert json.loads(request.prefill_body(b"{}")) == kept | {
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {},
    }


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_fields_of_another_api_mean_nothing(endpoint):
    """vLLM ignores them there, so they neither split a request's KV nor keep it whole."""
    request = parse({"n": 3, "echo": True, "use_beam_search": True, "prompt_logprobs": 1}, endpoint)
    assert (request.num_consumers, request.obstacle) == (1, None)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, None),
        ({"truncation": "disabled"}, None),
        ({"truncation": None, "tools": None}, None),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "custom"}, {"type": "namespace"}]}, None),
        ({"tools": [{"type": "function"}, {"type": "web_search_preview"}]}, "builtin_tools"),
        ({"tools": [{"type": "mcp"}]}, "builtin_tools"),
        ({"tools": "f"}, "builtin_tools"),
    ],
)
def test_what_cannot_be_split_of_responses(fields, obstacle):
    """A prompt that is cut by `max_output_tokens`, or a tool after which vLLM asks its engine again."""
    assert parse({"input": "x"} | fields, Endpoint.RESPONSES).obstacle == obstacle


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_stored_responses_are_refused(field):
    """They would be in one engine, and the next request may meet another one."""
    with pytest.raises(RouterError) as caught:
        parse({"input": "x"} | field, Endpoint.RESPONSES)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "stateless", next(iter(field)))


def test_echo_in_chat_asks_for_prompt_logprobs():
    """vLLM computes prompt logprobs for every chat request with `echo`, as `top_logprobs` is 0 by default."""
    assert parse({"messages": [], "echo": True}, Endpoint.CHAT).obstacle == "echo_logprobs"


@pytest.mark.parametrize(("value", "is_streamed"), [(True, True), (False, False), (None, False), ("true", True)])
def test_streaming_is_known(value, is_streamed):
    """Whether a first token can be waited for depends on it."""
    assert parse({"prompt": "x", "stream": value}).is_streamed is is_streamed


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        (
            b'{"id":"x", "kv_transfer_params" : {"remote_port": 1.0, "a":"\\u00e9"}}',
            b'{"remote_port": 1.0, "a":"\\u00e9"}',
        ),
        (b'{"kv_transfer_params": null}', None),
        (b'{"id": 1}', None),
        (b"no json", None),
    ],
)
def test_transfer_params_are_taken_unchanged(answer, params):
    """What P's connector said reaches D's connector to the byte."""
    assert take_transfer_params(answer) == params


def test_the_answer_loses_the_transfer_params_only():
    """Every other field of D's answer stays as D wrote it."""
    answer = b'{"id":"x","usage": {"a":1.50},"kv_transfer_params":{"secret":1},"n":null}'
    assert without_transfer_params(answer) == b'{"id":"x","usage":{"a":1.50},"n":null}'


@pytest.mark.parametrize(
    "answer", [b'{"id": 1 }', b"no json", b'"kv_transfer_params" is no json', b'{"text": "\\"kv_transfer_params\\""}']
)
def test_an_answer_without_transfer_params_is_not_touched(answer):
    """No reason to encode anything again."""
    assert without_transfer_params(answer) == answer


def estimate(fields, endpoint=Endpoint.COMPLETIONS):
    raw = msgspec.json.decode(json.dumps(fields).encode(), type=dict[str, msgspec.Raw])
    return estimated_prompt_tokens(endpoint, raw)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([], 0), ([7], 1), ([1, 22, 333], 3), ([[1, 22, 333]], 3), ([[1, 2], [3], []], 3), (list(range(5000)), 5000)],
)
def test_token_ids_are_counted(prompt, tokens):
    """A prompt that is given as ids is known exactly."""
    assert estimate({"prompt": prompt}) == tokens


@pytest.mark.parametrize(("fields", "tokens"), [({}, 0), ({"prompt": "x" * 398}, 100), ({"prompt": ["x" * 396]}, 100)])
def test_text_is_guessed_from_its_bytes(fields, tokens):
    """Four bytes are one token."""
    assert estimate(fields | {"max_tokens": 10**6, "user": "u" * 1000}) == tokens


def test_tools_are_part_of_a_chat_prompt():
    """A renderer writes them into it."""
    messages = [{"role": "user", "content": "x" * 400}]
    alone = estimate({"messages": messages}, Endpoint.CHAT)
    assert 100 <= alone < 120
    assert estimate({"messages": messages, "tools": ["t" * 400]}, Endpoint.CHAT) - alone in range(100, 103)


def test_an_image_is_not_as_long_as_its_bytes():
    """A megabyte of base64 is no quarter of a million tokens."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    assert 1000 <= estimate({"messages": [{"role": "user", "content": [image]}]}, Endpoint.CHAT) < 1100
    text = {"type": "text", "text": "x" * 4000}
    assert 3000 <= estimate({"messages": [{"role": "user", "content": [image, text, image]}]}, Endpoint.CHAT) < 3100


def test_a_conversation_that_grows_keeps_its_prefixes():
    """Its next turn begins with the bytes of the last one; another model's does not count."""
    turns = [{"role": "user", "content": "x" * 3000}]
    first = parse({"model": "m", "messages": turns}, Endpoint.CHAT).prefixes
    more = [*turns, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z" * 9000}]
    second = parse({"model": "m", "messages": more, "temperature": 0.5}, Endpoint.CHAT).prefixes
    assert (len(first), len(second)) == (3, 12)
    assert second[:3] == first
    assert parse({"model": "other", "messages": more}, Endpoint.CHAT).prefixes[0] != first[0]


def test_a_short_prompt_has_no_prefix():
    """Nothing is to be gained."""
    assert parse({"prompt": "hi"}).prefixes == ()


TEXT = "x" * 400


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.RESPONSES, {"input": TEXT}),
        (Endpoint.RESPONSES, {"input": [{"role": "user", "content": TEXT}]}),
        (Endpoint.RESPONSES, {"instructions": TEXT}),
        (Endpoint.RESPONSES, {"tools": [TEXT]}),
        (Endpoint.MESSAGES, {"messages": [{"role": "user", "content": TEXT}]}),
        (Endpoint.MESSAGES, {"system": [{"type": "text", "text": TEXT}]}),
        (Endpoint.MESSAGES, {"tools": [TEXT]}),
    ],
)
def test_every_part_of_a_prompt_counts(endpoint, fields):
    """Whatever the API calls it."""
    assert 100 <= estimate(fields | {"metadata": {"user_id": TEXT}}, endpoint) < 120


@pytest.mark.parametrize("space", ["", " "])
def test_images_of_messages_and_responses_are_not_as_long_as_their_bytes(space):
    """Messages has them in a field of their own. A short field of that name is what it is: text."""
    encoded = "A" * 1_000_000
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded}"}
    for endpoint, field, image in ((Endpoint.MESSAGES, "messages", block), (Endpoint.RESPONSES, "input", part)):
        value = json.dumps([{"role": "user", "content": [image, image]}], separators=(",", f":{space}")).encode()
        assert 2000 <= estimated_prompt_tokens(endpoint, {field: msgspec.Raw(value)}) < 2100
    call = {"type": "tool_use", "id": "t", "name": "send", "input": {"data": "A" * 40, "empty": {"data": ""}}}
    assert estimate({"messages": [{"role": "assistant", "content": [call]}]}, Endpoint.MESSAGES) < 60


@pytest.mark.parametrize(
    ("endpoint", "before", "after"),
    [(Endpoint.RESPONSES, "instructions", "input"), (Endpoint.MESSAGES, "system", "messages")],
)
def test_prefixes_of_responses_and_messages(endpoint, before, after):
    """What many prompts begin with is found, with short questions behind it, and so is a conversation that grows."""
    shared = {before: "s" * 3000}
    turns = [{"role": "user", "content": "x" * 9000}]
    first = parse({after: turns, **shared}, endpoint).prefixes
    grown = parse({**shared, after: [*turns, {"role": "assistant", "content": "y"}], "store": True}, endpoint).prefixes
    question = parse({**shared, after: [{"role": "user", "content": "hi"}]}, endpoint).prefixes
    assert (len(first), len(question)) == (12, 3)
    assert grown == first
    assert first[:3] == question
    assert parse({before: "t" * 3000, after: turns}, endpoint).prefixes[0] != first[0]
    assert parse({**shared, after: turns, "model": "other"}, endpoint).prefixes[0] != first[0]
