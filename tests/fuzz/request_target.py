"""What the router reads of a request before an engine sees it: bodies, deadlines, names of hosts.

The first byte says which; the rest is it. Whatever it is, it is taken or refused in the router's own words, and what
the engines get of a body that was taken is JSON with the router's own parameters in it.
"""

import json
import random
from collections.abc import Sequence

import msgspec
from tests.fuzz.mutation import changed_text

from kvberth.router.deadline import allowed_seconds
from kvberth.router.engines_file import parse_engines
from kvberth.router.errors import RouterError
from kvberth.router.fields import Endpoint
from kvberth.router.forms import error_response
from kvberth.router.hosts import HostNames
from kvberth.router.request import parse_request, take_transfer_params, without_transfer_params

__all__ = ["changed", "run", "seeds"]

_ENDPOINTS = tuple(Endpoint)
_OTHERS = 4
_PARAMS = b'{"transfer_id":"t-1","attempt":0}'
_HOSTS = HostNames("127.0.0.1", ("router.example",))


def run(data: bytes) -> None:
    """Read one of them."""
    kind, body = (data[0] if data else 0) % (len(_ENDPOINTS) + _OTHERS), data[1:]
    path = _ENDPOINTS[kind] if kind < len(_ENDPOINTS) else _ENDPOINTS[0]
    try:
        match kind - len(_ENDPOINTS):
            case 0:
                seconds = allowed_seconds(body.decode("latin-1"), 10.0)
                assert seconds is not None
                assert 0 < seconds <= 10.0
            case 1:
                _HOSTS.check([each.decode("latin-1") for each in body.split(b"\n")])
            case 2:
                _read_engines(body)
            case 3:
                take_transfer_params(body)
                without_transfer_params(body)
            case _:
                _read_body(path, body)
    except RouterError as error:
        json.loads(error_response(path, error))


def changed(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    return data[:1] + changed_text(data[1:], [other[1:] for other in others], draw)


def seeds() -> list[bytes]:
    """One of each; the bodies have all fields that are looked at."""
    ids = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "n": 2, "echo": True, "logprobs": 1}
    text = {"model": "m", "prompt": ["a", "b"], "vllm_xargs": {"a": "b"}, "truncate_prompt_tokens": 3, "stop": []}
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    chat = {
        "messages": [{"role": "user", "content": parts}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "text"},
        "stream": True,
        "max_completion_tokens": 7,
        "cache_salt": "s",
    }
    responses = {"model": "m", "instructions": "be", "input": "hi", "tools": [{"type": "mcp"}], "background": False}
    messages = {"model": "m", "system": "be", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    bodies = [(0, ids), (0, text), (1, chat), (2, responses), (3, messages)]
    others = [
        *(b"\x041.5", b"\x05localhost:8000", b"\x05router.example\n[::1]:80"),
        b"\x06# engines\nhttp://10.0.0.4:8000  prefill\nhttps://a.example/base\n",
        b'\x07{"id":"p","kv_transfer_params":{"transfer_id":"t"},"choices":[]}',
    ]
    return [*(bytes((kind,)) + json.dumps(body).encode() for kind, body in bodies), *others]


def _read_engines(text: bytes) -> None:
    try:
        parse_engines(text.decode(errors="replace"))
    except ValueError as error:
        assert str(error).startswith("line "), error


def _read_body(endpoint: Endpoint, body: bytes) -> None:
    request = parse_request(endpoint, body)
    assert request.num_consumers >= 1
    assert request.estimated_prompt_tokens >= 0
    for again in (request, request.continued([1, 2], [3])) if request.is_continuable else (request,):
        for sent in (again.prefill_body(_PARAMS), again.decode_body(_PARAMS, with_token_ids=True)):
            params = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])["kv_transfer_params"]
            assert b'"transfer_id":"t-1"' in bytes(params)
    assert again.decode_body(None) is not None
