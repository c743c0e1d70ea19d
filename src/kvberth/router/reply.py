"""Sends one response over ASGI and remembers how far it came.

What a client does not read is not collected here: the server's `send` waits while its buffer for the connection is
full, and no more is read from the engine meanwhile. `StallWatch` tells when that has lasted too long.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing

from starlette.types import Message, Send

from kvberth.router.answer import Header, Streamed, Whole, whole_events
from kvberth.router.errors import RouterError
from kvberth.router.forms import error_event, error_response
from kvberth.router.headers import JSON

__all__ = ["Reply", "StallWatch"]


class Reply:
    """A response in the making. `status` is None until its head is sent; from then on an error cannot change it.

    `path` decides the form of errors. `sending_since` is when the send that waits for the client began, or None.
    """

    def __init__(self, send: Send, path: str) -> None:
        self.status: int | None = None
        self._is_mid_stream = False
        self._path = path
        self._send_now = send
        self.sending_since: float | None = None

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

        What its source raises passes through, with the response left open: for `send_error`, or for another stream that
        goes on where this one ended.
        """
        if self.status is None:
            await self._send_head(answer.status, (*answer.headers, *own_headers))
            self._is_mid_stream = True
        async with aclosing(whole_events(answer)) as events:
            async for chunk in events:
                body = chunk if pass_on is None else pass_on(chunk)
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
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
        headers = (JSON, *error.headers, *own_headers)
        await self.send_whole(Whole(error.status, headers, error_response(self._path, error)))

    async def _send_head(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, message: Message) -> None:
        self.sending_since = time.monotonic()
        await self._send_now(message)
        self.sending_since = None


class StallWatch:
    """Watches one reply until `close`: `stalled` is done once a send has waited for its client for so many seconds.

    It looks now and then, because a timer for each of a stream's chunks would cost nearly as much as sending them.
    """

    def __init__(self, reply: Reply, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply = reply
        self._seconds = seconds
        self.stalled: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_later(seconds, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        since = self._reply.sending_since
        left = self._seconds if since is None else since + self._seconds - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.stalled.set_result(None)
