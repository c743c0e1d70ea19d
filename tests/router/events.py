"""The events of a stream as vLLM 0.32 writes them, for fake engines."""

import json

from .fakes import CHAT, COMPLETIONS

PROMPT_IDS, TEXTS = [7, 8, 9], ["a", "b", "c", "d", "e"]
DONE = b"data: [DONE]\n\n"


def event(endpoint, index, *, created=100, prompt_ids=None, ids=True, last=5):
    """The `index`-th token's event as vLLM writes it where ids are asked for."""
    choice = {"index": 0}
    choice |= {"delta": {"content": TEXTS[index]}} if endpoint == CHAT else {"text": TEXTS[index]}
    choice |= {"logprobs": None, "finish_reason": "length" if index == last - 1 else None}
    if endpoint == COMPLETIONS:
        choice["prompt_token_ids"] = prompt_ids
    choice["token_ids"] = [100 + index] if ids else None
    return data(head(endpoint, created) | {"choices": [choice]})


def role(created=100, prompt_ids=PROMPT_IDS):
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return data(head(CHAT, created) | {"choices": [choice], "prompt_token_ids": prompt_ids})


def usage(endpoint, prompt_tokens, made, created=100):
    told = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + made, "completion_tokens": made}
    return data(head(endpoint, created) | {"choices": [], "usage": told})


def whole(endpoint, start=0, created=100, prompt_ids=PROMPT_IDS):
    """All events from a token on, of an engine that was asked for ids."""
    first = [role(created, prompt_ids)] if endpoint == CHAT else []
    tokens = [
        event(endpoint, index, created=created, prompt_ids=prompt_ids if index == start else None)
        for index in range(start, 5)
    ]
    return [*first, *tokens, usage(endpoint, len(prompt_ids), 5 - start, created), DONE]


def without_ids(events):
    """The same, of an engine that was not."""
    text = b"".join(events)
    for index in range(5):
        text = text.replace(b'"token_ids":[%d]' % (100 + index), b'"token_ids":null')
    return text.replace(b'"prompt_token_ids":[7,8,9]', b'"prompt_token_ids":null')


def head(endpoint, created):
    kind = "chat.completion.chunk" if endpoint == CHAT else "text_completion"
    return {"id": "x-1", "object": kind, "created": created, "model": "m"}


def data(value):
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def named(name, value):
    """An event of the APIs that name theirs (Responses, Messages)."""
    return b"event: " + name.encode() + b"\n" + data({"type": name} | value)
