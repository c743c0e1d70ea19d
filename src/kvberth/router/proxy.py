"""The endpoints that generate text: one request is one exchange between a prefill and a decode worker."""

import asyncio
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from kvberth.router.answer import Header, Streamed
from kvberth.router.call import Call
from kvberth.router.deadline import Spent
from kvberth.router.errors import RouterError
from kvberth.router.exchange import Exchange, Service
from kvberth.router.headers import BINDING, MODE, PATH, REASON, request_headers
from kvberth.router.legs import StreamBrokenError
from kvberth.router.request import Endpoint, parse_request

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)

_Choice = TypeVar("_Choice", bound=StrEnum)


class Proxy:
    """The ASGI application of one endpoint.

    `get_service` is asked per request, because a service exists only while the router serves.
    """

    def __init__(self, endpoint: Endpoint, get_service: Callable[[], Service]) -> None:
        self._endpoint = endpoint
        self._get_service = get_service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; when the client goes away, both legs are aborted before this returns."""
        await _Generation(self._endpoint, self._get_service(), scope, send).run(receive)


class _Generation(Call):
    """One request for text, and what is counted of it."""

    def __init__(self, endpoint: Endpoint, service: Service, scope: Scope, send: Send) -> None:
        super().__init__(service, scope, send, endpoint)
        self._endpoint = endpoint
        self._exchange: Exchange | None = None

    @property
    def kv_path(self) -> str:
        return self._exchange.life.path if self._exchange else "none"

    def own_headers(self) -> list[Header]:
        if self._exchange is None:
            return []
        life = self._exchange.life
        reason = [(REASON, life.undivided_reason)] if life.undivided_reason else []
        bound = [] if life.undivided_reason else [(BINDING, life.binding.value)]
        return [(PATH, life.path), *bound, *reason]

    def count(self) -> None:
        super().count()
        if self._exchange and self._exchange.life.undivided_reason:
            self.service.metrics.undivided.labels(self._exchange.life.undivided_reason).inc()

    async def answer(self, body: bytes) -> None:
        config = self.service.config
        mode = self._asked(MODE, config.mode, "invalid_mode")
        request = parse_request(self._endpoint, body)
        headers = request_headers(self.headers.items(), self.request_id, with_credentials=config.passes_credentials)
        binding = self._asked(BINDING, config.binding, "invalid_binding")
        self._exchange = exchange = Exchange(self.service, request, mode, binding, headers)
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.seconds_left()):
                await self._settle_and_send(exchange)
        except TimeoutError as error:
            prefill_seconds = exchange.prefill_seconds()
            spent = Spent(self.queue_seconds, prefill_seconds, time.monotonic() - began - prefill_seconds)
            raise spent.timeout(self.allowed_seconds or 0.0) from error
        except StreamBrokenError as error:
            self.service.metrics.broken_streams.inc()
            logger.warning("request %s: the decode leg broke in mid-stream: %s", self.request_id, error)
            message = "The decode leg's engine went away in the middle of its answer."
            raise RouterError(502, message, code="decode_failed") from error
        finally:
            await exchange.close()

    async def _settle_and_send(self, exchange: Exchange) -> None:
        answer = await exchange.settle()
        if isinstance(answer, Streamed):
            elapsed = time.monotonic() - self.arrived
            self.service.metrics.time_to_first_token.labels(exchange.life.path).observe(elapsed)
            await self.reply.send_stream(answer, self.own_headers())
        else:
            await self.reply.send_whole(answer, self.own_headers())

    def _asked(self, header: str, default: _Choice, code: str) -> _Choice:
        """What a header asks for, one of the values of the default's kind."""
        asked = self.headers.get(header)
        if asked is None:
            return default
        kind = type(default)
        try:
            return kind(asked)
        except ValueError as error:
            message = f"{header} must be one of {', '.join(kind)}, got {asked!r}."
            raise RouterError(400, message, code=code, param=header) from error
