"""The router as an application."""

import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvberth.keys import Keyring, read_key_pair
from kvberth.router.admin import admin_routes, is_change, view_routes
from kvberth.router.admission import Admission
from kvberth.router.config import RouterConfig
from kvberth.router.control import Control
from kvberth.router.engine_client import EngineClient
from kvberth.router.engines import Role, Source
from kvberth.router.engines_file import NamedEngine, read_engines_file
from kvberth.router.errors import RouterError
from kvberth.router.exchange import Service
from kvberth.router.fields import Endpoint
from kvberth.router.fleet import Fleet
from kvberth.router.forms import error_response
from kvberth.router.headers import REQUEST_ID, id_headers
from kvberth.router.hosts import HostNames
from kvberth.router.journal import Journal
from kvberth.router.keys import ApiKeys, Keys
from kvberth.router.metrics import Metrics
from kvberth.router.openapi import description
from kvberth.router.page import page_routes
from kvberth.router.proxy import Proxy
from kvberth.router.relay import MODEL, Relay, Relayed
from kvberth.router.roster import Roster, log_breaker, rereading
from kvberth.router.status import status_routes
from kvberth.router.tracing import tracing_to
from kvberth.router.watch import watching

__all__ = ["create_admin_app", "create_app"]

_RAW_ID = REQUEST_ID.encode()


def create_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI application, for uvicorn with our `server_settings`.

    Its connections and its watch over the engines live with its lifespan.

    Raises `EnginesFileError` if there is an engines file that cannot be used, `ssl.SSLError` if the engines' authority
    cannot, `KeyFileError` if the keys for the control channel cannot, `TracingError` if traces are asked for and cannot
    be made.
    """
    in_file = read_engines_file(Path(config.engines_file)) if config.engines_file is not None else []
    tls = _engine_tls(config)
    keyring = _keyring(config)
    open_tracing = tracing_to(config.otlp_traces_endpoint)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        admission = Admission(config.max_in_flight, config.max_queue)
        async with (
            Control(keyring) as control,
            EngineClient(config.connect_timeout_seconds, api_key=config.engine_api_key, tls=tls) as client,
            watching(client, config.health_interval_seconds) as watch,
            open_tracing() as tracing,
        ):
            fleet = Fleet(
                prefill_policy=config.prefill_policy,
                decode_policy=config.decode_policy,
                affinity_seconds=config.affinity_seconds,
                local_prefill_tokens=config.local_prefill_tokens,
                on_forgotten=watch.forget,
                on_breaker=log_breaker,
            )
            roster = Roster(fleet, watch)
            for each in _in_settings(config):
                roster.add(each.url, each.role, Source.SETTINGS)
            roster.apply(in_file)
            metrics = Metrics(fleet, lambda: admission.in_flight, lambda: admission.queued)
            app.state.service = Service(
                config, fleet, roster, watch, metrics, client, control, admission, Journal(), tracing
            )
            with rereading(roster, Path(config.engines_file) if config.engines_file is not None else None):
                yield

    def get_service() -> Service:
        service: Service = app.state.service
        return service

    keys = Keys(config.api_key)
    app = _App(
        keys,
        {str(endpoint): Proxy(endpoint, get_service) for endpoint in Endpoint},
        routes=_routes(config, get_service),
        middleware=[Middleware(_RequestIds), Middleware(ApiKeys, keys)],
        exception_handlers=_EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    # A redirect would name the host that the client's own header names.
    app.router.redirect_slashes = False
    return app


def create_admin_app(app: Starlette, config: RouterConfig) -> Starlette:
    """The admin API of a router, to be served at `admin_host` and `admin_port` within the lifespan of `app`."""

    def get_service() -> Service:
        service: Service = app.state.service
        return service

    admin = Starlette(
        routes=admin_routes(get_service, HostNames(config.admin_host, config.allowed_host)),
        middleware=[Middleware(_RequestIds)],
        exception_handlers=_EXCEPTION_HANDLERS,
    )
    admin.router.redirect_slashes = False
    return admin


def _routes(config: RouterConfig, get_service: Callable[[], Service]) -> list[Route]:
    about = msgspec.json.encode(description(with_keys=bool(config.api_key)))

    async def openapi(_request: Request) -> Response:
        return Response(about, media_type="application/json")

    relay = Relay(get_service)
    hosts = HostNames(config.host, config.allowed_host)
    return [
        *(Route(endpoint, Proxy(endpoint, get_service), methods=["POST"]) for endpoint in Endpoint),
        Route("/v1/responses/{id}", _no_stored_response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", _no_stored_response, methods=["POST"]),
        *(Route(path, relay, methods=["POST"]) for path in Relayed),
        *status_routes(get_service),
        Route(MODEL, relay, methods=["GET"]),
        Route("/openapi.json", openapi),
        *view_routes(get_service, hosts),
        *page_routes(hosts),
    ]


def _engine_tls(config: RouterConfig) -> ssl.SSLContext | bool:
    if config.engine_ca_file is not None:
        return ssl.create_default_context(cafile=config.engine_ca_file)
    return not config.engine_insecure


def _keyring(config: RouterConfig) -> Keyring | None:
    if config.control_key_file is None or config.control_peers_dir is None:
        return None
    return Keyring(read_key_pair(Path(config.control_key_file)), Path(config.control_peers_dir))


async def _no_stored_response(_request: Request) -> Response:
    text = "Responses are not stored behind this router: each engine would know its own only."
    raise RouterError(404, text, code="stateless")


def _in_settings(config: RouterConfig) -> Iterable[NamedEngine]:
    yield from (NamedEngine(url, Role.PREFILL) for url in config.prefill)
    yield from (NamedEngine(url, Role.DECODE) for url in config.decode)
    yield from (NamedEngine(url) for url in config.engines)


class _App(Starlette):
    """Takes requests for text past routes and middleware, which cost as much as to read them."""

    def __init__(self, keys: Keys, proxies: Mapping[str, Proxy], **settings: Any) -> None:
        super().__init__(**settings)
        self._keys = keys
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            proxy = self._proxies.get(scope["path"])
            if proxy is not None and self._keys.let_in(scope):
                scope[REQUEST_ID] = _request_id(scope)
                await proxy(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


class _RequestIds:
    """Gives every request an id, the client's own if it has one, and every response the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_headers(scope["path"], request_id))
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _RAW_ID and value:
            return str(value, "latin-1")
    return token_hex(16)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message, path = error.detail, request.scope["path"]
    if error.status_code == 404:
        message = f"There is no {path} here. There is: {', '.join(_paths(request))}."
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}."
    if is_change(path, request.method):
        message += " Engines are changed at the router's admin port (--admin-port) only."
    said = RouterError(error.status_code, message, code=error.detail.lower().replace(" ", "_"))
    return _error_answer(request, said, dict(error.headers or {}))


async def _router_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RouterError):
        raise error
    return _error_answer(request, error, dict(error.headers))


_EXCEPTION_HANDLERS: Mapping[Any, Any] = {HTTPException: _http_error, RouterError: _router_error}


def _error_answer(request: Request, error: RouterError, headers: dict[str, str]) -> Response:
    body = error_response(request.scope["path"], error)
    return Response(body, error.status, headers=headers, media_type="application/json")


def _paths(request: Request) -> list[str]:
    app: Starlette = request.app
    return [route.path_format for route in app.routes if isinstance(route, Route)]
