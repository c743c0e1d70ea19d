"""The endpoints that generate nothing: health, metrics, models, version."""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvberth import __version__
from kvberth.router.breaker import BreakerState
from kvberth.router.engine_connection import HttpError
from kvberth.router.engines import Engine
from kvberth.router.errors import RouterError
from kvberth.router.exchange import Service
from kvberth.router.headers import REQUEST_ID, request_headers, response_headers

__all__ = ["status_routes"]

Health = Literal["ok", "degraded", "unavailable"]

_MODELS_PATIENCE_SECONDS = 10.0


class _EngineStatus(msgspec.Struct):
    url: str
    ready: bool
    in_flight: int
    problem: str | None
    engine_id: str | None
    draining: bool
    breaker: BreakerState


class _RouterStatus(msgspec.Struct):
    """`unknown` are the engines that have not said yet what they are."""

    status: Health
    prefill: list[_EngineStatus]
    decode: list[_EngineStatus]
    unknown: list[_EngineStatus]


def status_routes(get_service: Callable[[], Service]) -> list[Route]:
    async def health(_request: Request) -> Response:
        fleet = get_service().fleet
        status = _RouterStatus(
            status=_health(fleet.prefill, fleet.decode, time.monotonic()),
            prefill=[_describe(engine) for engine in fleet.prefill],
            decode=[_describe(engine) for engine in fleet.decode],
            unknown=[_describe(engine) for engine in fleet.in_role(None)],
        )
        code = 503 if status.status == "unavailable" else 200
        return Response(msgspec.json.encode(status), code, media_type="application/json")

    async def metrics(_request: Request) -> Response:
        return Response(get_service().metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(request: Request) -> Response:
        service = get_service()
        known = [*service.fleet.decode, *service.fleet.prefill]
        engine = next((engine for engine in known if engine.is_ready), None)
        if engine is None:
            raise RouterError(503, "No engine is ready to say what it serves.", code="no_engine", retry_after_seconds=1)
        headers = request_headers(
            request.headers.items(),
            request.scope[REQUEST_ID],
            with_credentials=service.config.passes_credentials,
        )
        try:
            async with asyncio.timeout(_MODELS_PATIENCE_SECONDS):
                answer = await service.client.fetch("GET", engine.url, "/v1/models", headers=headers)
        except (HttpError, TimeoutError) as error:
            raise RouterError(502, "The engine did not say what it serves.", code="engine_failed") from error
        return Response(answer.body, answer.status, headers=dict(response_headers(answer.headers)))

    async def version(_request: Request) -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    async def ping(_request: Request) -> Response:
        return Response()

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/version", version),
        Route("/ping", ping, methods=["GET", "POST"]),
    ]


def _health(prefill: list[Engine], decode: list[Engine], now: float) -> Health:
    if not any(engine.is_available(now) for engine in decode):
        return "unavailable"
    return "ok" if any(engine.is_available(now) for engine in prefill) else "degraded"


def _describe(engine: Engine) -> _EngineStatus:
    return _EngineStatus(
        url=engine.url,
        ready=engine.is_ready,
        in_flight=engine.in_flight,
        problem=engine.problem,
        engine_id=engine.info.engine_id if engine.info else None,
        draining=engine.is_draining,
        breaker=engine.breaker.state,
    )
