"""Sends one response over ASGI and remembers how far it came."""

from collections.abc import Iterable
from contextlib import aclosing

from starlette.types import Send

from kvberth.router.answer import Header, Streamed, Whole, whole_events
from kvberth.router.errors import RouterError
from kvberth.router.headers import JSON

__all__ = ["Reply"]


class Reply:
    """A response in the making. `status` is None until its head is sent; from then on an error cannot change it."""

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self._is_mid_stream = False
        self._send = send

    async def send_whole(self, answer: Whole, own_headers: Iterable[Header] = ()) -> None:
        length = ("content-length", str(len(answer.body)))
        await self._send_head(answer.status, (*answer.headers, *own_headers, length))
        await self._send({"type": "http.response.body", "body": answer.body})

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
            await self._send({"type": "http.response.body", "body": b"data: " + error.body() + b"\n\n"})
            return
        if self.status is not None:
            return
        headers = [JSON, *own_headers]
        if error.retry_after_seconds is not None:
            headers.append(("retry-after", str(error.retry_after_seconds)))
        await self.send_whole(Whole(error.status, tuple(headers), error.body()))

    async def _send_head(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
