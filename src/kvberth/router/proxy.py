"""The endpoints that generate text: one request is one exchange between a prefill and a decode worker."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from kvberth.router.answer import Answer, Header, StreamBrokenError, Streamed
from kvberth.router.binding import Binding
from kvberth.router.call import Call
from kvberth.router.config import Mode
from kvberth.router.continuation import Continuation
from kvberth.router.deadline import Spent
from kvberth.router.engines import Engine
from kvberth.router.errors import RouterError, without_frames
from kvberth.router.exchange import Exchange, Service
from kvberth.router.fields import Endpoint
from kvberth.router.headers import BINDING, MODE, PATH, REASON, id_headers, request_headers
from kvberth.router.request import ClientRequest, parse_request
from kvberth.router.tally import Tally
from kvberth.router.timeline import What

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
        self._legs_headers: list[Header] = []
        self._tally: Tally | None = None
        service.journal.begin(self._timeline)

    def own_headers(self) -> list[Header]:
        ids = id_headers(self.path, self.request_id).items()
        if self._exchange is None:
            return [*ids]
        life = self._exchange.life
        reason = [(REASON, life.undivided_reason)] if life.undivided_reason else []
        bound = [] if life.undivided_reason else [(BINDING, life.binding.value)]
        return [*ids, (PATH, life.path), *bound, *reason]

    def count(self) -> None:
        if self._tally is not None:
            self._tally.write_to(self._timeline)
        super().count()
        self.service.journal.end(self._timeline)

    async def answer(self, body: bytes) -> None:
        config = self.service.config
        mode = self._asked(MODE, config.mode, "invalid_mode")
        binding = self._asked(BINDING, config.binding, "invalid_binding")
        request = parse_request(self._endpoint, body)
        self._timeline.mode = mode
        self._timeline.note(
            time.monotonic(),
            What.ADMITTED,
            prompt_tokens=request.estimated_prompt_tokens,
            streamed=request.is_streamed,
            model=request.model,
        )
        self._legs_headers = request_headers(
            self.headers.items(), self.request_id, with_credentials=config.passes_credentials
        )
        began = time.monotonic()
        try:
            left = self.seconds_left()
            async with nullcontext() if left is None else asyncio.timeout(left):
                await self._answer(request, mode, binding)
        except TimeoutError as error:
            prefill_seconds = self._exchange.prefill_seconds() if self._exchange else 0.0
            spent = Spent(self.queue_seconds, prefill_seconds, time.monotonic() - began - prefill_seconds)
            raise spent.timeout(self.allowed_seconds or 0.0) from error
        except StreamBrokenError as error:
            logger.warning("request %s: the decode leg broke in mid-stream: %s", self.request_id, error)
            message = "The decode leg's engine went away in the middle of its answer."
            raise RouterError(502, message, code="decode_failed") from error

    async def _answer(self, request: ClientRequest, mode: Mode, binding: Binding) -> None:
        """One exchange, and another one each time that a stream breaks and can be continued."""
        continuation = None
        if request.is_continuable and self.service.config.continue_streams:
            continuation = Continuation(request, shows_ids=request.shows_token_ids)
        broken: StreamBrokenError | None = None
        while True:
            last = self._exchange
            self._exchange = exchange = Exchange(
                self.service,
                request,
                mode=mode,
                binding=binding,
                new_headers=lambda: self.trace.leg_headers(self._legs_headers),
                timeline=self._timeline,
                max_retries=last.life.retries_left - 1 if last else self.service.config.max_retries,
                failed_decodes=_failed_decodes(last) if last else (),
                with_token_ids=continuation is not None,
            )
            try:
                answer = await self._settle(exchange)
                if broken is not None and not (isinstance(answer, Streamed) and answer.status == 200):
                    raise broken
                await self._send(answer, continuation)
            except StreamBrokenError as error:
                if error is broken:
                    raise
                self._note_break(error)
                if continuation is None or not continuation.is_possible or exchange.life.retries_left == 0:
                    raise
                broken = without_frames(error)
            except RouterError as error:
                raise broken or error from None
            else:
                return
            finally:
                exchange.close()
            request = self._continue(continuation, broken)

    def _continue(self, continuation: Continuation, broken: StreamBrokenError) -> ClientRequest:
        """The request for what is left of an answer whose stream has broken."""
        request = continuation.request()
        logger.warning("request %s: goes on elsewhere, since its stream has broken: %s", self.request_id, broken)
        self._timeline.note(time.monotonic(), What.CONTINUED, tokens=continuation.num_tokens)
        return request

    def _note_break(self, error: StreamBrokenError) -> None:
        self._timeline.note(time.monotonic(), What.LEG_FAILED, leg="decode", kind="stream_broken", detail=str(error))

    async def _settle(self, exchange: Exchange) -> Answer:
        try:
            return await exchange.settle()
        finally:
            if self.reply.status is None:
                self._timeline.path = exchange.life.path

    async def _send(self, answer: Answer, continuation: Continuation | None) -> None:
        if not isinstance(answer, Streamed):
            await self.reply.send_whole(answer, self.own_headers())
            return
        self._timeline.note(time.monotonic(), What.FIRST_TOKEN)
        if self._tally is None:
            gaps = self.service.metrics.gaps(self._timeline.path, self._timeline.binding)
            self._tally = Tally(time.monotonic, gaps, continuation)
        await self.reply.send_stream(answer, self.own_headers(), self._tally.pass_on)

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


def _failed_decodes(exchange: Exchange) -> list[Engine]:
    """Those that have failed a request, the one whose stream has broken among them."""
    decode = exchange.life.decode
    return [*exchange.life.failed_decodes, *([decode] if decode is not None else [])]
