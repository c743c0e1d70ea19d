"""The endpoints that any one engine can serve alone: its answer passes through, its own 404 included.

A relayed request is in flight at its engine like every leg. To the engine's breaker it counts only where it brings no
answer: that an engine tokenizes does not prove that it generates, nor does a model that cannot embed speak against it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from kvberth.router.answer import Whole
from kvberth.router.breaker import Outcome
from kvberth.router.call import Call
from kvberth.router.choice import RequestFacts
from kvberth.router.engine_connection import HttpError
from kvberth.router.engines import Engine
from kvberth.router.errors import FailureKind, RouterError
from kvberth.router.exchange import Service
from kvberth.router.headers import request_headers, response_headers
from kvberth.router.timeline import What

__all__ = ["MODEL", "Relay", "Relayed"]

_TRIES = 2
# Nothing is known of the prompt, and most of these need no KV cache for it.
_FACTS = RequestFacts()


class Relayed(StrEnum):
    """What is relayed with its body (POST)."""

    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    EMBEDDINGS = "/v1/embeddings"
    POOLING = "/pooling"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"
    CLASSIFY = "/classify"
    COUNT_TOKENS = "/v1/messages/count_tokens"


MODEL = "/v1/models/{id:path}"
_PATHS = frozenset(Relayed)


class Relay:
    """The ASGI application of these endpoints."""

    def __init__(self, get_service: Callable[[], Service]) -> None:
        self._get_service = get_service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; when the client goes away, the engine's work is aborted before this returns."""
        await _RelayedCall(self._get_service(), scope, send, scope["path"]).run(receive)


class _RelayedCall(Call):
    def __init__(self, service: Service, scope: Scope, send: Send, path: str) -> None:
        super().__init__(service, scope, send, path, path if path in _PATHS else MODEL)
        self._method: str = scope["method"]
        self._timeline.path = "relayed"

    async def answer(self, body: bytes) -> None:
        if any(step in (".", "..") for step in self.path.split("/")):
            # A name, not a way to other paths of an engine.
            raise RouterError(404, "There is no such model.", code="not_found")
        try:
            async with asyncio.timeout(self.seconds_left()):
                await self.reply.send_whole(await self._ask(body))
        except TimeoutError as error:
            message = f"The request took longer than the {self.allowed_seconds:g} s that it was to take."
            raise RouterError(504, message, code="engine_timeout") from error

    async def _ask(self, body: bytes) -> Whole:
        """What the first engine says that says anything."""
        engine = None
        for engine in self._candidates():
            try:
                return await self._ask_engine(engine, body)
            except HttpError as error:
                detail = str(error)
                engine.mark_unready(detail)
                self._timeline.note(
                    time.monotonic(), What.LEG_FAILED, leg="decode", kind=FailureKind.UNREACHABLE, detail=detail
                )
        if engine is None:
            raise RouterError(503, "No engine is ready to serve this.", code="no_engine", retry_after_seconds=1)
        raise RouterError(502, "The engine failed on this request.", code="engine_failed")

    def _candidates(self) -> Iterator[Engine]:
        engines = self.service.fleet.for_request(_FACTS, time.monotonic)
        tried: list[Engine] = []
        while len(tried) < _TRIES:
            choice = engines.choose_decode(tried) or engines.choose_prefill(tried)
            if choice is None:
                return
            tried.append(choice.engine)
            yield choice.engine

    async def _ask_engine(self, engine: Engine, body: bytes) -> Whole:
        fleet, config = self.service.fleet, self.service.config
        kept = request_headers(self.headers.items(), self.request_id, with_credentials=config.passes_credentials)
        visit = fleet.enter(engine, _FACTS, time.monotonic())
        self._timeline.note(visit.started_at, What.DECODE_SENT, engine=engine.url)
        outcome = Outcome.UNDECIDED
        try:
            answer = await self.service.client.fetch(
                self._method, engine.url, quote(self.path), headers=self.trace.leg_headers(kept), body=body
            )
        except HttpError:
            outcome = Outcome.FAILURE
            raise
        finally:
            fleet.report(visit, outcome, time.monotonic())
            fleet.leave(visit)
        return Whole(answer.status, response_headers(answer.headers), answer.body)
