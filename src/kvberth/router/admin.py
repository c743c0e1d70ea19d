"""The admin API: engines are added, drained and removed while the router serves; engines and requests are looked at.

What changes anything is served on a port of its own or not at all, so that it can be kept from clients by where it
listens. What only shows something stands beside the clients' API as well, where the page for people finds it.

Both have a key of their own, so that clients' keys neither open them nor are needed for them, and no share in the
limits of requests: when they are reached is when an operator needs to look. They are left out of `/openapi.json`,
because they are not for clients.
"""

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvberth.router.breaker import BreakerState
from kvberth.router.engines import Engine, Role, Source, engine_url
from kvberth.router.errors import RouterError
from kvberth.router.exchange import Service
from kvberth.router.hosts import HostNames, is_loopback_address
from kvberth.router.roster import RoleConflictError
from kvberth.router.timelines import all_requests, one_request

__all__ = ["admin_routes", "is_change", "is_view", "view_routes"]

_MAX_BODY_BYTES = 64 * 1024
_ONE_REQUEST = "/kvberth/requests/"
_ROLES = {role.word: role for role in Role}
# A request with one of these did not come from a program on this machine: a proxy passed it on, or a browser sends it
# for some page.
_SIGNS_OF_OTHERS = ("forwarded", "x-forwarded-for", "x-real-ip", "origin")


class _LoadStatus(msgspec.Struct):
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int | None
    age_seconds: float


class _BreakerStatus(msgspec.Struct):
    state: BreakerState
    failures_in_a_row: int
    retry_in_seconds: float | None


class _EngineStatus(msgspec.Struct):
    """Everything that is known of an engine."""

    url: str
    role: str | None
    asserted_role: str | None
    source: Source
    ready: bool
    problem: str | None
    draining: bool
    leaving: bool
    engine_id: str | None
    control_address: str | None
    tp_size: int | None
    in_flight: int
    prompt_tokens_in_flight: int
    transfers: int
    free_kv_tokens: float | None
    prefill_tokens_per_second: float | None
    load: _LoadStatus | None
    breaker: _BreakerStatus


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class _New(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    role: Literal["prefill", "decode"] | None = None


Handler = Callable[[Service, Request], Awaitable[Response]]
T = TypeVar("T", bound=msgspec.Struct)


def view_routes(get_service: Callable[[], Service], hosts: HostNames) -> list[Route]:
    """What only shows something."""
    return _routes(_VIEWS, get_service, hosts)


def admin_routes(get_service: Callable[[], Service], hosts: HostNames) -> list[Route]:
    """All of it."""
    return _routes(_ALL, get_service, hosts)


def is_view(path: str) -> bool:
    """Whether `view_routes` serve this path; they look at their own key."""
    return path in _VIEWS or path.startswith(_ONE_REQUEST)


def is_change(path: str, method: str) -> bool:
    """Whether this changes something, and so is served by `admin_routes` alone."""
    return method != "GET" and method in _ALL.get(path, ())


def _routes(
    table: Mapping[str, Mapping[str, Handler]], get_service: Callable[[], Service], hosts: HostNames
) -> list[Route]:
    def route(path: str, handlers: Mapping[str, Handler]) -> Route:
        async def answer(request: Request) -> Response:
            service = get_service()
            _admit(request, service.config.admin_api_key, hosts)
            return await handlers["GET" if request.method == "HEAD" else request.method](service, request)

        return Route(path, answer, methods=list(handlers))

    return [route(path, handlers) for path, handlers in table.items()]


async def _list(service: Service, _request: Request) -> Response:
    now = time.monotonic()
    return _json({"engines": [_describe(engine, now) for engine in service.fleet.engines]})


async def _list_requests(service: Service, request: Request) -> Response:
    return _json(all_requests(service, request))


async def _show_request(service: Service, request: Request) -> Response:
    return _json(one_request(service, request))


async def _add(service: Service, request: Request) -> Response:
    new = await _read(request, _New)
    try:
        url = engine_url(new.url)
    except ValueError as error:
        raise RouterError(400, f"url: {error}.", code="invalid_url", param="url") from error
    is_new = service.fleet.find(url) is None
    try:
        engine = service.roster.add(url, _ROLES[new.role] if new.role else None, Source.API)
    except RoleConflictError as error:
        raise RouterError(409, f"{error}.", code="engine_exists", param="role") from error
    return _json(_describe(engine, time.monotonic()), 201 if is_new else 200)


async def _remove(service: Service, request: Request) -> Response:
    url = request.query_params.get("url")
    if url is None:
        raise RouterError(400, "Which engine? Give its URL as ?url=.", code="missing_url", param="url")
    engine = _find(service, url)
    service.roster.remove(engine)
    return _json(_describe(engine, time.monotonic()))


async def _drain(service: Service, request: Request) -> Response:
    engine = _find(service, (await _read(request, _Named)).url)
    service.roster.drain(engine)
    return _json(_describe(engine, time.monotonic()))


async def _resume(service: Service, request: Request) -> Response:
    engine = _find(service, (await _read(request, _Named)).url)
    service.roster.resume(engine)
    return _json(_describe(engine, time.monotonic()))


def _admit(request: Request, admin_key: str | None, hosts: HostNames) -> None:
    """Raises `RouterError` unless this client may do what it asks for."""
    if hosts.is_local or admin_key is None:
        hosts.check(request.headers.getlist("host"))
    if admin_key is not None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), admin_key.encode()):
            raise RouterError(401, "The admin API needs the router's admin key.", code="invalid_admin_key")
        return
    is_local = request.client is not None and is_loopback_address(request.client.host)
    if not is_local or any(name in request.headers for name in _SIGNS_OF_OTHERS):
        message = "Without an admin key, the admin API answers only to programs on the router's own machine."
        raise RouterError(403, message, code="admin_is_local")


async def _read(request: Request, kind: type[T]) -> T:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise RouterError(413, f"The body is larger than {_MAX_BODY_BYTES} bytes.", code="body_too_large")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RouterError(400, f"The body is not as expected: {error}.", code="invalid_body") from error


def _find(service: Service, url: str) -> Engine:
    engine = service.fleet.find(url.rstrip("/"))
    if engine is None:
        raise RouterError(404, f"There is no engine {url}.", code="unknown_engine", param="url")
    return engine


def _describe(engine: Engine, now: float) -> _EngineStatus:
    info, load, breaker = engine.info, engine.load, engine.breaker
    return _EngineStatus(
        url=engine.url,
        role=engine.role.word if engine.role else None,
        asserted_role=engine.asserted_role.word if engine.asserted_role else None,
        source=engine.source,
        ready=engine.is_ready,
        problem=engine.problem,
        draining=engine.is_draining,
        leaving=engine.is_leaving,
        engine_id=info.engine_id if info else None,
        control_address=f"{info.control_host}:{info.control_port}" if info and info.control_host else None,
        tp_size=info.tp_size if info else None,
        in_flight=engine.in_flight,
        prompt_tokens_in_flight=engine.held.tokens,
        transfers=engine.transfers,
        free_kv_tokens=engine.free_kv_tokens,
        prefill_tokens_per_second=engine.rate.tokens_per_second,
        load=_LoadStatus(load.running, load.waiting, load.kv_usage, load.kv_capacity_tokens, now - load.read_at)
        if load
        else None,
        breaker=_BreakerStatus(
            breaker.state,
            breaker.failures,
            max(0.0, breaker.retry_at - now) if breaker.state is not BreakerState.CLOSED else None,
        ),
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# One route per path, so that a method that is not taken is answered with all that are.
_VIEWS: Mapping[str, Mapping[str, Handler]] = {
    "/kvberth/engines": {"GET": _list},
    "/kvberth/requests": {"GET": _list_requests},
    _ONE_REQUEST + "{id:path}": {"GET": _show_request},
}
_ALL: Mapping[str, Mapping[str, Handler]] = {
    **_VIEWS,
    "/kvberth/engines": {"GET": _list, "POST": _add, "DELETE": _remove},
    "/kvberth/engines/drain": {"POST": _drain},
    "/kvberth/engines/resume": {"POST": _resume},
}
