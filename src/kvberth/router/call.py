"""One request at one endpoint: lets it in, reads it, has it answered, and ends it when its client goes away.

A request must hear of its client's going while it waits for engines and while it streams: from the connection itself,
since to wait for that over ASGI takes a task of its own.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kvberth.router.answer import Header
from kvberth.router.deadline import allowed_seconds, queue_timeout
from kvberth.router.errors import RouterError, without_frames
from kvberth.router.exchange import Service
from kvberth.router.headers import REQUEST_ID, TIMEOUT
from kvberth.router.reply import CONNECTION, ClientConnection, Reply
from kvberth.router.timeline import CLIENT_STALLED, CLIENT_WENT_AWAY, Timeline

__all__ = ["Call"]

logger = logging.getLogger(__name__)

_CODE_OF_ABANDONED = 499  # nginx's code, for those who count only: nobody is there to read it


class _ClientStalledError(Exception):
    """The client is there, but has read nothing for too long."""


class Call(ABC):
    """One request; `answer` is what the endpoint does with it once it is in.

    `error` is the router's own, if the request ended with one.

    Args:
        path: as the client wrote it.
        route: the same without what stands in its variable parts.
    """

    def __init__(self, service: Service, scope: Scope, send: Send, path: str, route: str | None = None) -> None:
        self.path = path
        self.service = service
        self.headers = Headers(scope=scope)
        self.request_id: str = scope[REQUEST_ID]
        self._connection: ClientConnection = scope[CONNECTION]()
        self.reply = Reply(send, self._connection, path)
        self.arrived = time.monotonic()
        self.queue_seconds = 0.0
        self.allowed_seconds: float | None = None
        self.error: RouterError | None = None
        self._is_abandoned = False
        self._has_stalled = False
        self._task: asyncio.Task[None] | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._timeline = Timeline(self.request_id, route or path, time.time(), self.arrived, method=scope["method"])
        self.trace = service.tracing.begin(self._timeline, self.headers)

    def own_headers(self) -> list[Header]:
        """What the router itself says in the head of the answer."""
        return []

    @abstractmethod
    async def answer(self, body: bytes) -> None:
        """Send the answer; cancelled when the client goes away. Raises `RouterError` for an error of the router's."""

    async def run(self, receive: Receive) -> None:
        """The whole request, with the outermost catch of its errors."""
        try:
            await self._run_admitted(receive)
        except RouterError as error:
            await self._send_error(without_frames(error), receive)
        except _ClientStalledError:
            await self._drop_client(receive)
        except Exception:
            logger.exception("request %s ended in an unexpected error", self.request_id)
            await self._send_error(
                RouterError(500, "The router failed on this request.", code="router_failed"), receive
            )
        finally:
            self.count()

    @property
    def code(self) -> int:
        """How it ended, for those who count; the status that was sent, unless nobody was there to read it."""
        return _CODE_OF_ABANDONED if self._is_abandoned else self.reply.status or 500

    def count(self) -> None:
        """Close the timeline, once, when the request is over, and show it to those who count and trace."""
        if self._is_abandoned and self._timeline.error is None:
            self._timeline.error = CLIENT_WENT_AWAY
        said = {"error": self.error.code, "message": self.error.message} if self.error is not None else {}
        self._timeline.end(time.monotonic(), self.code, **said)
        self.service.metrics.observe(self._timeline)
        self.trace.end()

    def seconds_left(self) -> float | None:
        """Until the request's deadline; None without one."""
        return None if self.allowed_seconds is None else self.arrived + self.allowed_seconds - time.monotonic()

    async def _run_admitted(self, receive: Receive) -> None:
        admission = self.service.admission
        self.allowed_seconds = allowed_seconds(self.headers.get(TIMEOUT), self.service.config.total_timeout_seconds)
        turn = asyncio.Event()
        place = admission.arrive(time.monotonic(), turn.set)
        if place is None:
            raise self._too_many("The router is at its limit of requests in flight, and nobody else can wait.")
        try:
            body = await self._read_body(receive)
            if body is None:
                self._is_abandoned = True
                return
            await self._answer_unless_client_goes(body, None if place.is_admitted else turn)
        finally:
            admission.leave(place, time.monotonic())

    async def _wait_and_answer(self, body: bytes, turn: asyncio.Event | None) -> None:
        if turn is not None:
            await self._wait_for(turn)
            self.queue_seconds = time.monotonic() - self.arrived
        self._timeline.waited_seconds = self.queue_seconds
        await self.answer(body)

    async def _wait_for(self, turn: asyncio.Event) -> None:
        patience = self.service.config.queue_timeout_seconds
        left = self.seconds_left()
        try:
            async with asyncio.timeout(patience if left is None else min(patience, left)):
                await turn.wait()
        except TimeoutError as error:
            if self.allowed_seconds is not None and left is not None and left <= patience:
                raise queue_timeout(self.allowed_seconds) from error
            raise self._too_many(f"The request has waited for its turn for {patience:g} s.") from error

    def _too_many(self, message: str) -> RouterError:
        seconds = self.service.admission.retry_after_seconds(time.monotonic())
        return RouterError(429, message, code="too_many_requests", retry_after_seconds=seconds)

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The request's body, or None if its client went away. Raises `RouterError` where it is not accepted."""
        config = self.service.config
        if self.headers.get("content-encoding", "identity") != "identity":
            raise RouterError(415, "Compressed request bodies are not accepted.", code="unsupported_encoding")
        chunks = []
        length = 0
        has_more = True
        while has_more:
            message = await (receive() if self._connection.has_body else self._receive_in_time(receive))
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

    async def _receive_in_time(self, receive: Receive) -> Message:
        left, patience = self.seconds_left(), self.service.config.client_stall_seconds
        try:
            async with asyncio.timeout(patience if left is None else min(patience, left)):
                return await receive()
        except TimeoutError as error:
            raise RouterError(408, "The request body did not come in time.", code="body_timeout") from error

    async def _answer_unless_client_goes(self, body: bytes, turn: asyncio.Event | None) -> None:
        """The work is this task's own, and cancelled by whoever hears of the client's end."""
        if self._connection.is_gone:
            self._is_abandoned = True
            return
        self._task = asyncio.current_task()
        self._connection.watcher = self
        if self._connection.is_full:
            self.full()
        try:
            await self._wait_and_answer(body, turn)
        except asyncio.CancelledError:
            if not self._is_abandoned or (self._task is not None and self._task.uncancel()):
                raise
        finally:
            self._connection.watcher = None
            if self._stall is not None:
                self._stall.cancel()
        if self._has_stalled:
            raise _ClientStalledError

    def lost(self) -> None:
        """The client is gone."""
        if not self._is_abandoned and self._task is not None:
            self._is_abandoned = True
            self._task.cancel()

    def full(self) -> None:
        """The client has to read before there is more."""
        self.reply.hold()
        seconds = self.service.config.client_stall_seconds
        self._stall = asyncio.get_running_loop().call_later(seconds, self._lose_patience)

    def drained(self) -> None:
        """It has."""
        if self._stall is not None:
            self._stall.cancel()
        self.reply.go_on()

    def _lose_patience(self) -> None:
        self._has_stalled = True
        self.lost()

    async def _send_error(self, error: RouterError, receive: Receive) -> None:
        self.error = error
        self._timeline.error = error.code
        try:
            async with asyncio.timeout(self.service.config.client_stall_seconds):
                await self.reply.send_error(error, self.own_headers())
        except TimeoutError:
            await self._drop_client(receive)

    async def _drop_client(self, receive: Receive) -> None:
        """Cut the connection of a client that does not read: to close it in order would wait for that."""
        self._is_abandoned = True
        self._timeline.error = CLIENT_STALLED
        logger.warning("request %s: its client has read nothing for too long", self.request_id)
        self._connection.abort()
        while (await receive())["type"] != "http.disconnect":
            pass
