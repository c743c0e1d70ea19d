"""Fake engines and a router between them: real HTTP on real sockets, all in the test's own event loop."""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import aiohttp
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kvberth.router import RouterConfig, create_app
from kvberth.router.app import create_admin_app
from kvberth.router.server import server_settings

Behaviour = Callable[["Seen", Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Seen:
    """One generation request as an engine saw it."""

    path: str
    headers: dict[str, str]
    body: bytes
    was_aborted: bool = False

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def transfer(self) -> dict[str, Any] | None:
        return self.json.get("kv_transfer_params")


@dataclass
class FakeEngine:
    """A vLLM server that behaves as the test says; `behave` answers generation requests."""

    role: str
    behave: Behaviour
    engine_id: str = "engine-0"
    is_healthy: bool = True
    says_who_it_is: bool = True
    load: dict[str, str] = field(default_factory=dict)
    kv_blocks: int | None = None  # of 16 tokens
    shows_metrics: bool = True
    loads_read: int = 0  # apart from the whole page
    freezes_with_work: bool = False  # once it has been asked for an answer, it says nothing of its health any more
    control: tuple[str, int] = ("10.0.0.9", 14579)
    port: int = 0
    certificate: tuple[str, str] | None = None
    key: str | None = None  # without it nothing is answered, not even that the engine is healthy
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key is not None and (b"authorization", f"Bearer {self.key}".encode()) not in scope["headers"]:
            await send_whole(send, 401, b"{}")
            return
        if self.freezes_with_work and self.seen and scope["path"] in ("/health", "/metrics", "/metrics/"):
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        match scope["path"]:
            case "/health":
                await send_whole(send, 200 if self.is_healthy else 503, b"")
            case "/metrics" | "/metrics/":
                self.loads_read += scope["path"] == "/metrics/"
                await send_whole(send, 200 if self.shows_metrics else 500, self.metrics_text().encode())
            case "/v1/models":
                await send_whole(send, 200, b'{"object":"list","data":[{"id":"%s"}]}' % self.engine_id.encode())
            case _:
                await self._generate(scope, receive, send)

    def metrics_text(self) -> str:
        ours = (
            f'kvberth:engine_info{{role="{self.role}",engine_id="{self.engine_id}",control_host="{self.control[0]}",'
            f'control_port="{self.control[1]}",tp_size="1",transfer_mode="push",protocol_version="1",'
            'model_name="m",engine="0"} 1\n'
        )
        load = "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in self.load.items())
        if self.kv_blocks is not None:
            load += f'vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{self.kv_blocks}"}} 1\n'
        return 'vllm:some_other{engine="0"} 0\n' + load + (ours if self.says_who_it_is else "")

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        seen = Seen(scope["path"], headers, body)
        self.seen.append(seen)
        self.arrived.set()
        work = asyncio.ensure_future(self.behave(seen, send))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            seen.was_aborted = True
            self.aborted.set()
        for task in (work, gone):
            task.cancel()
        await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()


async def send_whole(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    all_headers = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def answers(
    payload: object,
    status: int = 200,
    *,
    after: asyncio.Event | None = None,
    headers: Mapping[str, str] | None = None,
) -> Behaviour:
    """Answer with JSON, once `after` is set."""

    async def behave(_seen: Seen, send: Send) -> None:
        if after is not None:
            await after.wait()
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await send_whole(send, status, body, headers=headers)

    return behave


def streams(*chunks: bytes, after: asyncio.Event | None = None, then: Behaviour | None = None) -> Behaviour:
    """Stream server-sent events as vLLM does: the head at once, the chunks once `after` is set, then the end."""

    async def behave(seen: Seen, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if after is not None:
            await after.wait()
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        if then is not None:
            await then(seen, send)
        await send({"type": "http.response.body", "body": b""})

    return behave


async def hangs(_seen: Seen, _send: Send) -> None:
    await asyncio.Event().wait()


async def dies(_seen: Seen, _send: Send) -> None:
    """The server hangs up in the middle of the response."""
    await asyncio.sleep(0.02)
    raise ConnectionResetError("the fake engine dies")


def streams_on(*chunks: bytes, after: asyncio.Event) -> Behaviour:
    """Go on with a stream that has begun."""

    async def behave(_seen: Seen, send: Send) -> None:
        await after.wait()
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    return behave


def trickles(*chunks: bytes, every: float) -> Behaviour:
    """Go on with a stream that has begun, one chunk each so many seconds."""

    async def behave(_seen: Seen, send: Send) -> None:
        for chunk in chunks:
            await asyncio.sleep(every)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    return behave


def half_answer(half: bytes) -> Behaviour:
    """Announce more than is sent, and hang up."""

    async def behave(seen: Seen, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": half, "more_body": True})
        await dies(seen, send)

    return behave


def hangs_on_transfer(otherwise: Behaviour, *, unless_from: str = "nobody") -> Behaviour:
    """A decode worker that waits for blocks that do not come, unless they come from the engine `unless_from`."""

    async def behave(seen: Seen, send: Send) -> None:
        waits = seen.transfer is not None and seen.transfer["remote_engine_id"] != unless_from
        await (hangs if waits else otherwise)(seen, send)

    return behave


P_PARAMS = {"do_remote_prefill": True, "transfer_id": "from-p", "remote_engine_id": "p", "remote_port": 1}
P_ANSWER = {"id": "p", "choices": [], "kv_transfer_params": P_PARAMS}
D_ANSWER = {"id": "d", "choices": [{"index": 0, "text": "hello"}], "usage": {"total_tokens": 3}}


async def until(is_so: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for something that gives no sign of itself."""
    async with asyncio.timeout(5):
        while True:
            answer = is_so()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.005)


class QuickServer(uvicorn.Server):
    """uvicorn looks ten times a second whether it should end; a few hundred of them would take their time."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.may_end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.may_end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await until(lambda: not self.server_state.connections and not self.server_state.tasks)
        await self.lifespan.shutdown()


@asynccontextmanager
async def listening(app: ASGIApp, *, port: int = 0, **settings: Any) -> AsyncIterator[int]:
    """Serve `app` for as long as the context is open, with these settings of uvicorn; gives the port."""
    # With the protocol named, asyncio turns Nagle off; without, every answer in two writes is 40 ms late.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = QuickServer(uvicorn.Config(app, **({"log_config": None, "ws": "none"} | settings)))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started or task.done())
        try:
            yield listener.getsockname()[1]
        finally:
            server.may_end.set()
            await task


@dataclass
class Client:
    """A client of the router under test; `admin_url` is that of its admin API."""

    url: str
    session: aiohttp.ClientSession
    admin_url: str = ""

    def post(self, body: object, path: str = COMPLETIONS, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.session.post(self.url + path, data=BytesIO(data), headers=sent)

    def get(self, path: str, **headers: str) -> Any:
        return self.session.get(self.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def admin(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        return self.session.request(method, self.admin_url + path, json=body, headers=sent)

    async def engine(self, engine: FakeEngine) -> dict[str, Any] | None:
        """What the admin API says of an engine, None if it is not known."""
        async with self.get("/kvberth/engines") as response:
            known = {each["url"]: each for each in (await response.json())["engines"]}
        return known.get(engine.url)

    async def until_engine(self, engine: FakeEngine, **facts: Any) -> None:
        """Until the admin API says so of an engine."""

        async def is_so() -> bool:
            said = await self.engine(engine) or {}
            return all(said.get(name) == value for name, value in facts.items())

        await until(is_so)

    async def metric(self, name: str) -> float:
        """The value of one line of the router's /metrics, 0 if it is not there."""
        async with self.get("/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(name + " "):
                    return float(line.rpartition(" ")[2])
        return 0.0

    async def total(self, name: str, **labels: str) -> float:
        """The sum of all lines of a name in the router's /metrics that have these labels, once nothing is in flight.

        A request is counted a moment after its client has the last of its answer.
        """
        await self.until_idle()
        async with self.get("/metrics") as response:
            lines = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", await response.text(), re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for each, said, value in lines if each == name and wanted <= set(said.split(",")))

    async def health(self) -> dict[str, Any]:
        async with self.get("/health") as response:
            return await response.json() | {"code": response.status}

    async def text(self, body: object, path: str = COMPLETIONS, **headers: str) -> str:
        async with self.post(body, path, **headers) as response:
            return await response.text()

    async def until_problem(self, text: str, role: str = "decode") -> None:
        await until(lambda: self._says(role, text))

    async def until_idle(self) -> None:
        await until(self._is_idle)

    async def until_healthy(self, status: str = "ok") -> None:
        await until(lambda: self._is(status))

    async def _says(self, role: str, text: str) -> bool:
        return text in ((await self.health())[role][0]["problem"] or "")

    async def _is_idle(self) -> bool:
        return await self.metric("kvberth_router_requests_in_flight") == 0

    async def _is(self, status: str) -> bool:
        return (await self.health())["status"] == status


class Site:
    """Starts engines and routers for one test and ends them with it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.trusted: ssl.SSLContext | None = None

    async def prefill(self, behave: Behaviour | None = None, **settings: Any) -> FakeEngine:
        settings.setdefault("engine_id", "p")
        return await self._start(FakeEngine("kv_producer", behave or answers(P_ANSWER), **settings))

    async def decode(self, behave: Behaviour | None = None, **settings: Any) -> FakeEngine:
        settings.setdefault("engine_id", "d")
        return await self._start(FakeEngine("kv_consumer", behave or answers(D_ANSWER), **settings))

    async def router(
        self,
        prefill: Sequence[FakeEngine | str] = (),
        decode: Sequence[FakeEngine | str] = (),
        *,
        wait_for: str = "ok",
        **settings: Any,
    ) -> Client:
        settings.setdefault("health_interval_seconds", 0.05)
        config = RouterConfig(
            prefill=tuple(each if isinstance(each, str) else each.url for each in prefill),
            decode=tuple(each if isinstance(each, str) else each.url for each in decode),
            **settings,
        )
        app = create_app(config)
        port = await self._stack.enter_async_context(listening(app, **server_settings(config)))
        admin = create_admin_app(app, config)
        admin_port = await self._stack.enter_async_context(listening(admin, **server_settings(config)))
        connector = aiohttp.TCPConnector(ssl=self.trusted if self.trusted is not None else True)
        session = await self._stack.enter_async_context(
            aiohttp.ClientSession(auto_decompress=False, connector=connector)
        )
        scheme = "https" if config.ssl_certfile else "http"
        client = Client(f"{scheme}://127.0.0.1:{port}", session, f"{scheme}://127.0.0.1:{admin_port}")
        await client.until_healthy(wait_for)
        await until(lambda: self._all_were_heard_from(client))
        return client

    async def _all_were_heard_from(self, client: Client) -> bool:
        health = await client.health()
        engines = health["prefill"] + health["decode"] + health["unknown"]
        return all(engine["problem"] != "not heard from yet" for engine in engines)

    async def _start(self, engine: FakeEngine) -> FakeEngine:
        certfile, keyfile = engine.certificate or (None, None)
        engine.port = await self._stack.enter_async_context(
            listening(engine, ssl_certfile=certfile, ssl_keyfile=keyfile)
        )
        return engine
