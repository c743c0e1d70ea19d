"""Sends one response over ASGI and remembers how far it came.

What a client does not read is not collected here: the server's `send` waits while its buffer for the connection is
full, no more is read from the engine meanwhile, and a wait that is too long ends the response.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

from starlette.types import Message, Send

from kvberth.router.answer import Header, Streamed, Whole, whole_events
from kvberth.router.errors import RouterError
from kvberth.router.forms import error_event, error_response
from kvberth.router.headers import JSON

__all__ = ["ClientStalledError", "Reply"]


class ClientStalledError(Exception):
    """The client is there, but has read nothing for too long."""


class Reply:
    """A response in the making. `status` is None until its head is sent; from then on an error cannot change it.

    `path` decides the form of errors. Every method raises `ClientStalledError`.
    """

    def __init__(self, send: Send, path: str, stall_seconds: float) -> None:
        self.status: int | None = None
        self._is_mid_stream = False
        self._path = path
        self._stall_seconds = stall_seconds
        self._send_now = send

    async def send_whole(self, answer: Whole, own_headers: Iterable[Header] = ()) -> None:
        length = ("content-length", str(len(answer.body)))
        await self._send_head(answer.status, (*answer.headers, *own_headers, length))
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await self._send({"type": "http.response.body"})  # waits until the client has read most of the body

    async def send_stream(self, answer: Streamed, own_headers: Iterable[Header] = ()) -> None:
        """Pass a stream on; what its source raises passes through, with the response left open for `send_error`."""
        await self._send_head(answer.status, (*answer.headers, *own_headers))
        self._is_mid_stream = True
        async with aclosing(whole_events(answer)) as events:
            async for chunk in events:
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_mid_stream = False
        await self._send({"type": "http.response.body"})

    async def send_error(self, error: RouterError, own_headers: Iterable[Header] = ()) -> None:
        """The error as a response, or as the last event of a stream that has begun: without its [DONE].

        Behind a complete response there is nothing left to say.
        """
        if self._is_mid_stream:
            self._is_mid_stream = False
            await self._send({"type": "http.response.body", "body": error_event(self._path, error)})
            return
        if self.status is not None:
            return
        headers = [JSON, *own_headers]
        if error.retry_after_seconds is not None:
            headers.append(("retry-after", str(error.retry_after_seconds)))
        await self.send_whole(Whole(error.status, tuple(headers), error_response(self._path, error)))

    async def _send_head(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._send_now(message)
        except TimeoutError as error:
            raise ClientStalledError(f"the client has read nothing for {self._stall_seconds:g} s") from error
