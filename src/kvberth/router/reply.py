"""Sends one response and remembers how far it came: heads and ends over ASGI, a stream's events past it.

What a client does not read is not collected here: while the server's buffer for its connection is full, no more is read
from the engine.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.types import Message, Send

from kvberth.router.answer import Header, StreamBrokenError, Streamed, StreamSource, Whole, WholeEvents
from kvberth.router.errors import RouterError
from kvberth.router.forms import error_event, error_response
from kvberth.router.headers import JSON

__all__ = ["CONNECTION", "ClientConnection", "Reply", "Watcher"]

CONNECTION = "kvberth.connection"
"""The key of a scope under which our server puts a weak reference to the client's connection."""


class Watcher(Protocol):
    """Who hears what happens to a client's connection. Nothing of that is heard twice in a row."""

    def lost(self) -> None:
        """The client is gone."""
        ...

    def full(self) -> None:
        """What is written waits for the client to read."""
        ...

    def drained(self) -> None:
        """It has read most of it."""
        ...


class ClientConnection(Protocol):
    """What our server lets a request do beside ASGI, where a task for each wait would cost as much as its work."""

    watcher: Watcher | None

    @property
    def is_gone(self) -> bool: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def has_body(self) -> bool:
        """All of the request's body is here."""
        ...

    def write_body(self, data: bytes) -> None:
        """One more piece of a body whose head is sent and has not said its length. Never waits."""
        ...

    def abort(self) -> None:
        """Cut it, with what is unsent."""
        ...


class Reply:
    """A response in the making. `status` is None until its head is sent; from then on an error cannot change it.

    `path` decides the form of errors. Whoever watches the connection says when to `hold` and when to `go_on`.
    """

    def __init__(self, send: Send, connection: ClientConnection, path: str) -> None:
        self.status: int | None = None
        self._is_mid_stream = False
        self._path = path
        self._send = send
        self._connection = connection
        self._source: StreamSource | None = None

    async def send_whole(self, answer: Whole, own_headers: Iterable[Header] = ()) -> None:
        length = ("content-length", str(len(answer.body)))
        await self._send_head(answer.status, (*answer.headers, *own_headers, length))
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await self._send({"type": "http.response.body"})  # waits until the client has read most of the body

    async def send_stream(
        self,
        answer: Streamed,
        own_headers: Iterable[Header] = (),
        pass_on: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Pass a stream on, or what `pass_on` makes of its events.

        Raises `StreamBrokenError`, and what `pass_on` raises, with the response left open: for `send_error`, or for
        another stream that goes on where this one ended.
        """
        if self.status is None:
            await self._send_head(answer.status, (*answer.headers, *own_headers))
            self._is_mid_stream = True
        last = await self._pass(answer, pass_on or _as_it_is)
        self._is_mid_stream = False
        await self._send({"type": "http.response.body", "body": last})

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
        headers = (JSON, *error.headers, *own_headers)
        await self.send_whole(Whole(error.status, headers, error_response(self._path, error)))

    def hold(self) -> None:
        """The client does not read: neither does the router."""
        if self._source is not None:
            self._source.pause()

    def go_on(self) -> None:
        if self._source is not None:
            self._source.resume()

    async def _pass(self, answer: Streamed, pass_on: Callable[[bytes], bytes]) -> bytes:
        """Each chunk goes from the engine's connection to the client's at once: only the stream's end wakes a task.

        Gives what came with the end, to be sent with it.
        """
        events = WholeEvents()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        last = b""

        def take(chunk: bytes, is_last: bool = False) -> None:
            nonlocal last
            if ended.done():
                return
            try:
                whole = events.cut(chunk)
                if is_last:
                    last = pass_on(whole) if whole else b""
                elif whole:
                    self._connection.write_body(pass_on(whole))
            except Exception as error:
                ended.set_exception(error)
                answer.rest.close()

        def tell_end(error: StreamBrokenError | None) -> None:
            if ended.done():
                return
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        self._source = answer.rest
        try:
            take(answer.first)
            answer.rest.pass_to(take, tell_end)
            if self._connection.is_full:
                answer.rest.pause()
            await ended
        finally:
            self._source = None
        return last + pass_on(events.rest) if events.rest else last

    async def _send_head(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        message: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(message)


def _as_it_is(events: bytes) -> bytes:
    return events
