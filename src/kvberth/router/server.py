"""The server that runs the router: uvicorn, and what it does not do about clients that do not read."""

import asyncio
import contextlib
import gc
import socket
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvberth.router.app import create_admin_app, create_app
from kvberth.router.config import RouterConfig
from kvberth.router.prompt_write import prompt_write
from kvberth.router.reply import CONNECTION, Watcher

__all__ = ["serve", "server_settings"]

_SHUTDOWN_SECONDS = 10
_MOST_GATHERED_BYTES = 16 * 1024
_MOST_IN_CIRCLES = 1_000_000
_KEEP_ALIVE_SECONDS = 120
"""An idle connection is for its client to close: a request that is on its way to one that the server closes is lost.

Clients keep theirs for 5 s (httpx, and with it the `openai` and `anthropic` clients), 15 s (aiohttp), 60 s (the load
balancers of nginx and AWS) or 90 s (Go).
"""


def serve(config: RouterConfig) -> None:
    """Run the router until it is told to stop (SIGINT, SIGTERM). Blocks; requests in flight get a few seconds.

    Raises:
        SystemExit: it cannot listen where it should; the log says why.
    """
    app = create_app(config)
    beside = None
    if config.admin_port is not None:
        beside = _Beside(_config(create_admin_app(app, config), config, config.admin_host, config.admin_port))
    _spare_streams_the_collector()
    server = _Server(_config(app, config, config.host, config.port), beside)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _config(app: Starlette, config: RouterConfig, host: str, port: int) -> uvicorn.Config:
    settings = server_settings(config)
    return uvicorn.Config(app, host, port, loop="uvloop", timeout_graceful_shutdown=_SHUTDOWN_SECONDS, **settings)


class _Beside(uvicorn.Server):
    """A second server in the same process: signals are the first one's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._sockets = [config.bind_socket()]  # now, before anything else has begun

    def begin(self) -> None:
        self._serving = asyncio.ensure_future(self.serve(self._sockets))

    async def end(self) -> None:
        self.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server(uvicorn.Server):
    """The router's server; with `beside` it, from its own start to its end."""

    def __init__(self, config: uvicorn.Config, beside: _Beside | None) -> None:
        super().__init__(config)
        self._beside = beside

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._beside is not None and self.started:
            self._beside.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._beside is not None:
            await self._beside.end()
        await super().shutdown(sockets)


def _spare_streams_the_collector() -> None:
    """Keep the garbage collector's pauses short and few: all streams wait for each of them.

    What is loaded by now, 100,000 objects, stays loaded, and need not be looked through each time. To look at all
    others takes 0.1 s where 2,000 streams are open, and finds next to nothing: a request that is over is in no circle.
    Python does it for every ten smaller collections; here they must be enough for a million objects in circles.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _MOST_IN_CIRCLES // (young * middle))


def server_settings(config: RouterConfig) -> dict[str, Any]:
    """For uvicorn: how the router meets its clients."""
    return {
        "http": partial(_Connection, config.client_stall_seconds),
        "ws": "none",
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "log_config": None,
        "access_log": False,
        "server_header": False,
    }


class _Connection(HttpToolsProtocol):
    """A client's connection as `ClientConnection` says.

    uvicorn closes a connection only in order: what is buffered for the client is sent first, however long that takes.
    """

    def __init__(self, stall_seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.watcher: Watcher | None = None
        self._stall_seconds = stall_seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathering = _Gathering(transport, self.loop)
        super().connection_made(cast("asyncio.Transport", self._gathering))

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused

    @property
    def has_body(self) -> bool:
        """Where another request has come behind this one, this one is here as well."""
        return not self.cycle.more_body

    def write_body(self, data: bytes) -> None:
        """In uvicorn's framing, which takes no note of a body's pieces where their length is not announced."""
        if data and not self.transport.is_closing():
            self._gathering.write_now(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        self.transport.abort()

    def on_message_begin(self) -> None:
        """A request begins; its scope gets the connection, which holds it: by strong references none would ever go."""
        super().on_message_begin()
        self.scope[CONNECTION] = weakref.ref(self)  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        """Nothing more comes of this answer."""
        self._gathering.flush()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.watcher is not None:
            self.watcher.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.watcher is not None:
            self.watcher.full()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.watcher is not None:
            self.watcher.drained()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing has come since the last answer: close, but do not wait for ever for that answer to be read."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._stall_seconds, self.transport.abort)


class _Gathering:
    """A transport that writes a head together with what follows it, an end with what came before, and that promptly.

    The loop's own writes each piece by itself, and each is a packet that wakes the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closing = transport.is_closing
        self._transport = transport
        self._write = prompt_write(transport)
        self._loop = loop
        self._pieces: list[bytes] = []
        self._flushing: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._pieces.append(data)
        if len(data) > _MOST_GATHERED_BYTES:
            self.flush()
        elif self._flushing is None:
            self._flushing = self._loop.call_soon(self.flush)

    def write_now(self, data: bytes) -> None:
        if self._pieces:
            self._pieces.append(data)
            self.flush()
        else:
            self._write(data)

    def flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        pieces, self._pieces = self._pieces, []
        if pieces and not self.is_closing():
            self._write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        self.flush()
        self._transport.close()
