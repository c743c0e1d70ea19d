"""Serves one request: reads it, has its exchange settled, sends what comes of it.

The endpoint is plain ASGI, because it must hear of the client's going while it waits for engines and while it streams.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvberth.router.answer import Header, Streamed
from kvberth.router.binding import Binding
from kvberth.router.config import Mode
from kvberth.router.errors import RouterError
from kvberth.router.exchange import Exchange, Service
from kvberth.router.headers import BINDING, MODE, PATH, REASON, REQUEST_ID, request_headers
from kvberth.router.legs import StreamBrokenError
from kvberth.router.reply import Reply
from kvberth.router.request import Endpoint, parse_request

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)

_CLIENT_WENT_AWAY = 499  # nginx's code, for the metric only: nobody is there to read it


class Proxy:
    """The ASGI application of one endpoint.

    `get_service` is asked per request, because a service exists only while the router serves.
    """

    def __init__(self, endpoint: Endpoint, get_service: Callable[[], Service]) -> None:
        self._endpoint = endpoint
        self._get_service = get_service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; when the client goes away, both legs are aborted before this returns."""
        service = self._get_service()
        call = _Call(self._endpoint, service, Headers(scope=scope), scope[REQUEST_ID], Reply(send))
        service.load.in_flight += 1
        try:
            await call.run(receive)
        finally:
            service.load.in_flight -= 1
            call.count()


class _Call:
    """One request at one endpoint, and what is counted of it."""

    def __init__(self, endpoint: Endpoint, service: Service, headers: Headers, request_id: str, reply: Reply) -> None:
        self._arrived = time.monotonic()
        self._endpoint = endpoint
        self._service = service
        self._headers = headers
        self._request_id = request_id
        self._reply = reply
        self._exchange: Exchange | None = None
        self._is_abandoned = False

    async def run(self, receive: Receive) -> None:
        """The whole request, with the outermost catch of its errors."""
        try:
            body = await self._read_body(receive)
            if body is None:
                self._is_abandoned = True
                return
            await self._answer_unless_client_goes(body, receive)
        except RouterError as error:
            await self._reply.send_error(error, self._own_headers())
        except Exception:
            logger.exception("request %s ended in an unexpected error", self._request_id)
            failed = RouterError(500, "The router failed on this request.", code="router_failed")
            await self._reply.send_error(failed, self._own_headers())

    def count(self) -> None:
        """Add this request to the metrics, once, when it is over."""
        metrics = self._service.metrics
        life = self._exchange.life if self._exchange else None
        code = _CLIENT_WENT_AWAY if self._is_abandoned else self._reply.status or 500
        metrics.requests.labels(life.path if life else "none", str(code)).inc()
        if self._is_abandoned:
            metrics.client_disconnects.inc()
        if life and life.undivided_reason:
            metrics.undivided.labels(life.undivided_reason).inc()

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The request's body, or None if its client went away. Raises `RouterError` where it is not accepted."""
        config = self._service.config
        if self._service.load.in_flight > config.max_in_flight:
            text = f"The router is at its limit of {config.max_in_flight} requests in flight."
            raise RouterError(429, text, code="too_many_requests", retry_after_seconds=1)
        if self._headers.get("content-encoding", "identity") != "identity":
            raise RouterError(415, "Compressed request bodies are not accepted.", code="unsupported_encoding")
        chunks = []
        length = 0
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            length += len(chunk)
            if length > config.max_body_bytes:
                text = f"The request body is larger than {config.max_body_bytes} bytes."
                raise RouterError(413, text, code="body_too_large")
            chunks.append(chunk)
            has_more = message.get("more_body", False)
        return b"".join(chunks)

    async def _answer_unless_client_goes(self, body: bytes, receive: Receive) -> None:
        answering = asyncio.create_task(self._answer(body))
        going = asyncio.create_task(_client_goes(receive))
        try:
            await asyncio.wait({answering, going}, return_when=asyncio.FIRST_COMPLETED)
            self._is_abandoned = not answering.done()
        finally:
            going.cancel()
            answering.cancel()
            await asyncio.wait({answering, going})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, body: bytes) -> None:
        mode = self._mode()
        request = parse_request(self._endpoint, body)
        headers = request_headers(self._headers.items(), self._request_id)
        self._exchange = exchange = Exchange(self._service, request, mode, self._binding(), headers)
        try:
            async with asyncio.timeout(self._service.config.total_timeout_seconds):
                await self._settle_and_send(exchange)
        except TimeoutError as error:
            leg = exchange.life.awaited_leg
            message = f"The request took longer than is allowed; it waited for its {leg} leg."
            raise RouterError(504, message, code=f"{leg}_timeout") from error
        except StreamBrokenError as error:
            self._service.metrics.broken_streams.inc()
            logger.warning("request %s: the decode leg broke in mid-stream: %s", self._request_id, error)
            message = "The decode leg's engine went away in the middle of its answer."
            raise RouterError(502, message, code="decode_failed") from error
        finally:
            await exchange.close()

    async def _settle_and_send(self, exchange: Exchange) -> None:
        answer = await exchange.settle()
        if isinstance(answer, Streamed):
            elapsed = time.monotonic() - self._arrived
            self._service.metrics.time_to_first_token.labels(exchange.life.path).observe(elapsed)
            await self._reply.send_stream(answer, self._own_headers())
        else:
            await self._reply.send_whole(answer, self._own_headers())

    def _mode(self) -> Mode:
        asked = self._headers.get(MODE)
        if asked is None:
            return self._service.config.mode
        try:
            return Mode(asked)
        except ValueError as error:
            message = f"{MODE} must be one of {', '.join(Mode)}, got {asked!r}."
            raise RouterError(400, message, code="invalid_mode", param=MODE) from error

    def _binding(self) -> Binding:
        asked = self._headers.get(BINDING)
        if asked is None:
            return self._service.config.binding
        try:
            return Binding(asked)
        except ValueError as error:
            message = f"{BINDING} must be one of {', '.join(Binding)}, got {asked!r}."
            raise RouterError(400, message, code="invalid_binding", param=BINDING) from error

    def _own_headers(self) -> list[Header]:
        if self._exchange is None:
            return []
        life = self._exchange.life
        reason = [(REASON, life.undivided_reason)] if life.undivided_reason else []
        bound = [] if life.undivided_reason else [(BINDING, life.binding.value)]
        return [(PATH, life.path), *bound, *reason]


async def _client_goes(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
