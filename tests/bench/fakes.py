"""An OpenAI-compatible server that behaves as the test says: real HTTP on a real socket, in the test's own event loop.

`python tests/bench/fakes.py PORT [SECONDS_PER_TOKEN]` serves one to try the command on by hand.
"""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Behaviour = Callable[["FakeServer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class FakeServer:
    """Where it is and what it was asked."""

    behave: Behaviour
    models: object = field(default_factory=lambda: {"data": [{"id": "fake-model"}]})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.times.append(asyncio.get_running_loop().time())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path)
        self.bodies.append(body)
        return await self.behave(self, request, body)

    async def list_models(self, _request: web.Request) -> web.Response:
        return web.json_response(self.models)


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(text: str) -> bytes:
    """One token's chunk as vLLM sends it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return event({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None})


def usage(prompt_tokens: int, output_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return event({"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": counts})


DONE = event(b"[DONE]")


async def begin(request: web.Request, **headers: str) -> web.StreamResponse:
    """The head of a stream."""
    sent = {"content-type": "text/event-stream; charset=utf-8"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    response = web.StreamResponse(headers=sent)
    await response.prepare(request)
    return response


def streams(*pieces: bytes, seconds_between: float = 0.0, **headers: str) -> Behaviour:
    """A stream of exactly these pieces, then its orderly end."""

    async def behave(_server: FakeServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request, **headers)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(seconds_between)
        return response

    return behave


def generates(seconds_per_token: float = 0.0, seconds_before: float = 0.0) -> Behaviour:
    """As many tokens as are asked for; the text depends on the prompt."""

    async def behave(_server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request, x_kvberth_path="push")
        await asyncio.sleep(seconds_before)
        for index in range(body["max_tokens"]):
            await response.write(token(f" {body['prompt'][index % len(body['prompt'])]}"))
            await asyncio.sleep(seconds_per_token)
        await response.write(usage(len(body["prompt"]), body["max_tokens"]) + DONE)
        return response

    return behave


def answers(status: int, payload: object) -> Behaviour:
    """JSON and no stream."""

    async def behave(*_: object) -> web.StreamResponse:
        return web.json_response(payload, status=status)

    return behave


def breaks_after(*pieces: bytes) -> Behaviour:
    """The connection is cut after these pieces; without any, before the head."""

    async def behave(_server: FakeServer, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request) if pieces else web.StreamResponse()
        for piece in pieces:
            await response.write(piece)
        await asyncio.sleep(0.02)  # what was written is on its way
        assert request.transport is not None
        request.transport.abort()
        return response

    return behave


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """The first for the first request, and so on; the last one for all others."""

    async def behave(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chosen = behaviours[min(len(server.bodies), len(behaviours)) - 1]
        return await chosen(server, request, body)

    return behave


@asynccontextmanager
async def listening(behave: Behaviour, port: int = 0, **settings: Any) -> AsyncIterator[FakeServer]:
    """Serve for as long as the context is open."""
    server = FakeServer(behave, **settings)
    app = web.Application(client_max_size=2**26)
    app.add_routes(
        [
            web.post("/v1/completions", server.complete),
            web.post("/v1/chat/completions", server.complete),
            web.get("/v1/models", server.list_models),
        ],
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def listening_in_thread(behave: Behaviour, **settings: Any) -> Iterator[FakeServer]:
    """The same for callers that have an event loop of their own, or none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-server", daemon=True)
    thread.start()
    context = listening(behave, **settings)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(5)
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(5)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


async def _serve_by_hand(port: int, seconds_per_token: float) -> None:
    async with listening(generates(seconds_per_token, 0.05), port) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_by_hand(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.01))
