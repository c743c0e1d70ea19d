"""Whatever a client sends, the router answers with its own or an engine's words, and nothing is left running."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvberth.router.fields import Endpoint
from kvberth.router.headers import MODE, REQUEST_ID, TIMEOUT
from kvberth.router.relay import Relayed

from .fakes import D_ANSWER, Client, FakeEngine, Site, answers, streams, until

EVENT = b"data: {}\n\n"
MANY = settings(max_examples=150)

FIELDS = [
    *("model", "prompt", "messages", "input", "stream", "n", "echo", "logprobs", "prompt_logprobs", "best_of"),
    *("use_beam_search", "max_tokens", "max_completion_tokens", "max_output_tokens", "truncation", "tools", "store"),
    *("truncate_prompt_tokens", "prompt_embeds", "vllm_xargs", "kv_transfer_params", "previous_response_id"),
    *("background", "response_format", "stop", "system", "thinking"),
]
HEADERS = [
    *(REQUEST_ID, MODE, TIMEOUT, "authorization", "x-api-key", "content-type", "content-encoding", "connection"),
    *("accept-encoding", "traceparent", "expect", "te", "cookie", "x-data-parallel-rank", "upgrade", "x"),
]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
huge_numbers = st.sampled_from([10**400, -(10**30), 1e308, float("inf"), float("nan")])
values = st.recursive(
    scalars | huge_numbers,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=10,
)
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8).map(lambda fields: json.dumps(fields).encode())


def nested(depth: int) -> bytes:
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


def repeated(fields: list[tuple[str, object]]) -> bytes:
    return (
        b"{" + b",".join(json.dumps(name).encode() + b":" + json.dumps(value).encode() for name, value in fields) + b"}"
    )


bodies = st.one_of(
    objects,
    values.map(lambda value: json.dumps(value).encode()),
    st.lists(st.tuples(st.sampled_from(FIELDS), values), max_size=6).map(repeated),
    st.integers(0, 100_000).map(nested),
    st.binary(max_size=60),
    st.tuples(objects, st.binary(max_size=4), st.integers(0, 60)).map(lambda x: x[0][: x[2]] + x[1] + x[0][x[2] :]),
)
# What stays one value for whoever reads it, and what HTTP allows in one.
odd_bytes = st.binary(max_size=12).map(lambda value: value.translate(None, b"\r\n\0"))
allowed_bytes = st.lists(st.sampled_from([9, *range(32, 127), *range(128, 256)]), max_size=12).map(bytes)
known_values = st.sampled_from([b"push", b"pull", b"1e-9", b"identity", b"gzip", b"close", b"Bearer k", b""])
header_values = odd_bytes | allowed_bytes | known_values
headers = st.lists(st.tuples(st.sampled_from(HEADERS), header_values), max_size=5)
paths = st.sampled_from([*Endpoint, *Relayed])


class Bench:
    """One router for all examples, with an event loop of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.engines: list[FakeEngine] = []
        self.client: Client = self._runner.run(self._start())

    async def _start(self) -> Client:
        async def behave(seen, send):
            is_streamed = b'"stream": true' in seen.body
            await (streams(EVENT, EVENT) if is_streamed else answers(D_ANSWER))(seen, send)

        site = Site(await self._stack.__aenter__())
        self.engines = [await site.prefill(), await site.decode(behave)]
        return await site.router(self.engines[:1], self.engines[1:], total_timeout_seconds=5)

    def status(self, request: bytes) -> int:
        """Send these bytes, wait for the end of the answer, and look that nothing is left behind."""
        return self._runner.run(self._status(request))

    async def _status(self, request: bytes) -> int:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(self.client.url.rpartition(":")[2]))
            try:
                writer.write(request)
                answer = await reader.read()
            finally:
                writer.close()
            await until(self._is_idle)
        for engine in self.engines:
            engine.seen.clear()
        assert answer, "the router has hung up without a word"
        return int(answer.split(b" ", 2)[1])

    async def _is_idle(self) -> bool:
        health = await self.client.health()
        legs = [engine["in_flight"] for engine in health["prefill"] + health["decode"]]
        return legs == [0, 0] and await self.client.metric("kvberth_router_requests_in_flight") == 0

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def request_bytes(path: str, body: bytes, extra: list[tuple[str, bytes]] | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: r\r\ncontent-length: {len(body)}\r\nconnection: close\r\n".encode()
    lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in extra or [])
    return head + lines + b"\r\n" + body


@MANY
@given(paths, bodies)
def test_any_body(bench, path, body):
    """Not one of them is a failure of the router or of an engine, and both legs are over when the answer is."""
    assert bench.status(request_bytes(path, body)) in {200, 400}


@MANY
@given(paths, objects, headers)
def test_any_headers(bench, path, body, extra):
    """The same for what stands in the head; a deadline may be too short, and a body in gzip is not taken."""
    assert bench.status(request_bytes(path, body, extra)) in {200, 400, 408, 415, 504}


@MANY
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
    st.text("/.%?#;\\ v1models[]@:\u00e9\0", min_size=1, max_size=20),
    odd_bytes,
)
def test_any_path_and_host(bench, method, path, host):
    """What is not there is said to be not there; no host makes a failure of it."""
    target = "/" + path.replace(" ", "%20").replace("\0", "%00")
    request = b"%s %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % (method.encode(), target.encode(), host)
    assert bench.status(request) in {200, 400, 404, 405, 408, 421}
