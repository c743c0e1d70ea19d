"""One HTTP/1.1 connection to an engine: a request at a time, its answer by callback.

What `engine_client.py` does with connections is not known here.
"""

import asyncio
import select
from collections.abc import Callable
from typing import Any, Protocol

import httptools

from kvberth.router.answer import Header
from kvberth.router.prompt_write import prompt_write

__all__ = ["Ask", "ConnectTimeoutError", "Connection", "HttpError", "Listener"]

_FIRST_FINAL_STATUS = 200


class HttpError(Exception):
    """An engine could not be asked, or its answer did not come whole."""


class ConnectTimeoutError(HttpError, TimeoutError):
    """There was no connection in time."""


class Listener(Protocol):
    """Who hears an answer: its head, what comes of its body, and its end, on the event loop's thread."""

    def on_head(self, status: int, headers: list[Header]) -> None:
        """Once. Names of headers are in lower case."""
        ...

    def on_body(self, data: bytes, is_last: bool) -> None:
        """Everything that came with one read, so never empty. `is_last`: a good end follows at once."""
        ...

    def on_end(self, error: HttpError | None) -> None:
        """Once, and nothing behind it. The answer is whole, or this is why it is not."""
        ...


class Ask:
    """One request and its answer, until the answer's end. Whoever listens may know it: behind the end nobody does."""

    __slots__ = ("connecting", "connection", "listener", "request")

    def __init__(self, listener: Listener, request: bytes) -> None:
        self.listener = listener
        self.request = request
        self.connecting: asyncio.Task[None] | None = None
        self.connection: Connection | None = None

    def close(self) -> None:
        """Abort it, whatever it is at: its listener hears no more. Behind its end this does nothing."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            self.connection.drop()

    def pause(self) -> None:
        """Read no more of the answer, until `resume`."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        keep: it is free for the next request.
        forget: it has ended.
    """

    transport: asyncio.Transport
    # What has come of the answer.
    _status: int
    _headers: list[Header]
    _pieces: list[bytes]
    _is_head_told: bool
    _is_framed: bool
    _is_complete: bool
    _is_reusable: bool

    def __init__(self, keep: Callable[["Connection"], None], forget: Callable[["Connection"], None]) -> None:
        self.idle_since = 0.0
        self._keep = keep
        self._forget = forget
        self._ask: Ask | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._is_paused = False
        self._begin_answer()

    def begin(self, ask: Ask) -> None:
        self._ask = ask
        ask.connection = self
        self._begin_answer()
        self._write(ask.request)
        ask.request = b""

    def drop(self) -> None:
        """Its ask is given up, and with it the connection: an engine hears of it by that."""
        self._let_go()
        self.transport.abort()

    def is_quiet(self) -> bool:
        """Whether it stands and nothing has come: an end, or what nobody has asked for."""
        return not self.transport.is_closing() and not self._poll.poll(0)

    def pause(self) -> None:
        if not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        self.transport = transport
        self._write = prompt_write(transport)
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def connection_lost(self, error: Exception | None) -> None:
        self._forget(self)
        del self._parser  # which knows this connection: the two would wait for the garbage collector
        if self._ask is None:
            return
        if self._status and not self._is_framed and error is None:
            self._end(None)  # an answer without a length ends with its connection
        else:
            self._end(HttpError(f"the connection has broken: {error}" if error else "the engine has hung up"))

    def data_received(self, data: bytes) -> None:
        if self._ask is None:
            self.transport.abort()  # it says what nobody has asked for
            return
        problem = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            problem = HttpError(f"this is no HTTP: {error.__context__ or error}")
            self._is_reusable = False  # also where it comes behind a whole answer
        # Whoever hears of something may give up.
        if self._status and self._ask is not None and not self._is_head_told:
            self._is_head_told = True
            self._ask.listener.on_head(self._status, self._headers)
        if self._pieces and self._ask is not None:
            pieces, self._pieces = self._pieces, []
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._ask.listener.on_body(data, self._is_complete)
        if self._ask is not None and (self._is_complete or problem is not None):
            self._end(None if self._is_complete else problem)

    # What the parser has found.

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._is_reusable = False  # a second answer

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status:
            return  # a trailer, or another answer's
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._is_framed = True
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            self._headers, self._is_framed = [], False
        elif not self._status:
            self._status = status

    def on_body(self, data: bytes) -> None:
        if not self._is_complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._status and not self._is_complete:
            self._is_complete = True
            self._is_reusable = self._parser.should_keep_alive()

    def _begin_answer(self) -> None:
        self._status = 0
        self._headers = []
        self._pieces = []
        self._is_head_told = False
        self._is_framed = False
        self._is_complete = False
        self._is_reusable = False

    def _end(self, error: HttpError | None) -> None:
        """The connection is free before its listener hears of the end, and may ask again."""
        listener = self._let_go()
        # What is unsent belongs to a request that was answered before it was read.
        if error is None and self._is_reusable and not self.transport.get_write_buffer_size():
            self.resume()
            self._keep(self)
        else:
            self.transport.abort()
        if listener is not None:
            listener.on_end(error)

    def _let_go(self) -> Listener | None:
        ask, self._ask = self._ask, None
        if ask is None:
            return None
        ask.connection = None
        listener = ask.listener
        del ask.listener
        return listener
