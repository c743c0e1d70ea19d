"""The router as an application, and the server that runs it."""

import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvberth.router.admin import admin_routes
from kvberth.router.config import RouterConfig
from kvberth.router.control import Control
from kvberth.router.engines import Role, Source
from kvberth.router.engines_file import NamedEngine, read_engines_file
from kvberth.router.errors import RouterError, error_body
from kvberth.router.exchange import Load, Service
from kvberth.router.fleet import Fleet
from kvberth.router.headers import REQUEST_ID
from kvberth.router.legs import open_session
from kvberth.router.metrics import Metrics
from kvberth.router.proxy import Proxy
from kvberth.router.request import Endpoint
from kvberth.router.roster import Roster, log_breaker, rereading
from kvberth.router.status import status_routes
from kvberth.router.watch import watching

__all__ = ["create_app", "serve"]

_SHUTDOWN_SECONDS = 10


def create_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI application. Its connections and its watch over the engines live with its lifespan.

    Raises `EnginesFileError` if there is an engines file that cannot be used.
    """
    in_file = read_engines_file(Path(config.engines_file)) if config.engines_file is not None else []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        load = Load()
        async with (
            Control() as control,
            open_session(config.connect_timeout_seconds) as session,
            watching(session, config.health_interval_seconds) as watch,
        ):
            fleet = Fleet(
                prefill_policy=config.prefill_policy,
                decode_policy=config.decode_policy,
                affinity_seconds=config.affinity_seconds,
                on_forgotten=watch.forget,
                on_breaker=log_breaker,
            )
            roster = Roster(fleet, watch)
            for each in _in_settings(config):
                roster.add(each.url, each.role, Source.SETTINGS)
            roster.apply(in_file)
            metrics = Metrics(fleet, lambda: load.in_flight)
            app.state.service = Service(config, fleet, roster, metrics, session, control, load)
            with rereading(roster, Path(config.engines_file) if config.engines_file is not None else None):
                yield

    def get_service() -> Service:
        service: Service = app.state.service
        return service

    app = Starlette(
        routes=[
            *(Route(endpoint, Proxy(endpoint, get_service), methods=["POST"]) for endpoint in Endpoint),
            *status_routes(get_service),
            *admin_routes(get_service),
        ],
        middleware=[Middleware(_RequestIds)],
        exception_handlers={HTTPException: _http_error, RouterError: _router_error},
        lifespan=lifespan,
    )
    return app


def serve(config: RouterConfig) -> None:
    """Run the router until it is told to stop (SIGINT, SIGTERM). Blocks; requests in flight get a few seconds."""
    uvicorn.run(
        create_app(config),
        host=config.host,
        port=config.port,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


def _in_settings(config: RouterConfig) -> Iterable[NamedEngine]:
    yield from (NamedEngine(url, Role.PREFILL) for url in config.prefill)
    yield from (NamedEngine(url, Role.DECODE) for url in config.decode)
    yield from (NamedEngine(url) for url in config.engines)


class _RequestIds:
    """Gives every request an id, the client's own if it has one, and every response the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID) or uuid.uuid4().hex
        scope[REQUEST_ID] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _http_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    body = error_body(error.status_code, error.detail, code=error.detail.lower().replace(" ", "_"))
    return Response(body, error.status_code, headers=dict(error.headers or {}), media_type="application/json")


async def _router_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, RouterError):
        raise error
    headers = {"retry-after": str(error.retry_after_seconds)} if error.retry_after_seconds is not None else {}
    return Response(error.body(), error.status, headers=headers, media_type="application/json")
