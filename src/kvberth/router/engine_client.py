"""HTTP/1.1 to engines: connections that are kept and carry one request at a time, answers by callback.

A leg needs no more than this, and a router needs it cheap: a request costs a fifth of what it does with a client
library that is made for everything. There are no redirects, cookies, proxies or packed bodies here, and no task for a
request whose connection stands.

No request is sent twice: who was asked once may have begun. A kept connection that its engine has closed meanwhile is
found out before anything is sent on it.
"""

import asyncio
import select
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httptools

from kvberth.router.answer import Header, Whole

__all__ = ["Ask", "ConnectTimeoutError", "EngineClient", "HttpError", "Listener"]

# vLLM closes a connection that was idle for 5 s. One that is younger is not closed while a request is on its way.
_IDLE_SECONDS = 2.0
_ADDRESS_SECONDS = 10.0  # for which a name's addresses are believed
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


class EngineClient:
    """A pool without a bound: what comes in is bounded elsewhere. Used as a context, which ends all connections.

    `api_key` goes with every request. `tls` is what certificates of https engines are checked against; False: nothing.
    """

    def __init__(
        self, connect_timeout_seconds: float, *, api_key: str | None = None, tls: ssl.SSLContext | bool = True
    ) -> None:
        self._connect_timeout_seconds = connect_timeout_seconds
        self._key_line = f"authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        self._tls = tls
        self._sites: dict[str, _Site] = {}
        self._connections: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for task in list(self._connecting):
            task.cancel()
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the connections hear of their end

    def ask(
        self,
        method: str,
        base_url: str,
        target: str,
        listener: Listener,
        *,
        headers: Iterable[Header] = (),
        body: bytes = b"",
    ) -> "Ask":
        """Ask what is behind `base_url`; `listener` hears the answer, later in any case.

        Where a connection is kept, the request is on its way when this returns. Raises `ValueError` for what cannot be
        a header.
        """
        site = self._sites.get(base_url)
        if site is None:
            site = self._sites[base_url] = _Site(base_url, self._tls)
        lines = [f"{method} {site.prefix}{target} HTTP/1.1\r\nhost: {site.host_header}\r\n{self._key_line}"]
        lines += [f"{name}: {value}\r\n" for name, value in headers]
        if body or method == "POST":
            lines.append(f"content-length: {len(body)}\r\n")
        head = "".join(lines)
        if head.count("\n") != len(lines) + 1 + bool(self._key_line) or head.count("\r") != head.count("\n"):
            raise ValueError("a header cannot have several lines")
        ask = Ask(listener, [f"{head}\r\n".encode("latin-1"), body])
        connection = self._kept(site)
        if connection is not None:
            connection.begin(ask)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(site, ask))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            ask.connecting = task
        return ask

    async def fetch(
        self, method: str, base_url: str, target: str, *, headers: Iterable[Header] = (), body: bytes = b""
    ) -> Whole:
        """A whole answer. Raises `HttpError`; a request that is cancelled is aborted."""
        answer = _Fetched()
        ask = self.ask(method, base_url, target, answer, headers=headers, body=body)
        try:
            return await answer.whole
        finally:
            ask.close()

    def _kept(self, site: "_Site") -> "_Connection | None":
        """The one that was used last: those that are not needed any more grow old."""
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while site.idle:
            connection = site.idle.pop()
            if connection.idle_since >= oldest and connection.is_quiet():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, site: "_Site", ask: "Ask") -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                connection = await self._open(site)
        except (OSError, ValueError) as error:  # a name that cannot be one is a `ValueError`
            ask.connecting = None
            if isinstance(error, TimeoutError) and error.errno is None:
                text = f"no connection to {site.host}:{site.port} within {self._connect_timeout_seconds:g} s"
                ask.listener.on_end(ConnectTimeoutError(text))
            else:
                ask.listener.on_end(HttpError(f"no connection to {site.host}:{site.port}: {error}"))
        else:
            ask.connecting = None
            connection.begin(ask)

    async def _open(self, site: "_Site") -> "_Connection":
        """At the first of its addresses that takes a connection."""
        loop = asyncio.get_running_loop()
        addresses = await site.addresses()
        for address in addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, site),
                    address,
                    site.port,
                    ssl=site.tls,
                    server_hostname=site.host if site.tls is not None else None,
                )
            except OSError:
                if address == addresses[-1]:
                    raise
            else:
                return connection
        raise OSError("the name has no address")

    def _opened(self, connection: "_Connection") -> None:
        self._connections.add(connection)

    def _closed(self, connection: "_Connection") -> None:
        self._connections.discard(connection)

    def _keep(self, connection: "_Connection") -> None:
        """For the next request to the same site."""
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        connection.site.idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(_IDLE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - _IDLE_SECONDS
        for site in self._sites.values():
            while site.idle and site.idle[0].idle_since <= oldest:
                site.idle.popleft().transport.abort()
        is_needed = any(site.idle for site in self._sites.values())
        self._sweep = loop.call_later(_IDLE_SECONDS, self._close_old) if is_needed else None


class Ask:
    """One request and its answer, until the answer's end."""

    __slots__ = ("connecting", "connection", "listener", "request")

    def __init__(self, listener: Listener, request: list[bytes]) -> None:
        self.listener = listener
        self.request = request
        self.connecting: asyncio.Task[None] | None = None
        self.connection: _Connection | None = None

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


class _Site:
    """Where an engine is, and the connections there that nobody uses."""

    def __init__(self, base_url: str, tls: ssl.SSLContext | bool) -> None:
        parts = urlsplit(base_url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.host_header = parts.netloc.rpartition("@")[2]
        self.prefix = parts.path
        self.tls = _context(tls) if parts.scheme == "https" else None
        self.idle: deque[_Connection] = deque()
        self._lookup: asyncio.Future[list[str]] | None = None
        self._looked_up_at = 0.0

    async def addresses(self) -> list[str]:
        """Of the host. Connections that are wanted at once ask for them once. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        is_old = loop.time() - self._looked_up_at > _ADDRESS_SECONDS
        if self._lookup is None or (self._lookup.done() and (is_old or self._lookup.exception() is not None)):
            self._looked_up_at = loop.time()
            self._lookup = loop.create_task(self._look_up())
        return await asyncio.shield(self._lookup)

    async def _look_up(self) -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]


class _Connection(asyncio.Protocol):
    """One connection. `site.idle` holds it while no `Ask` does."""

    transport: asyncio.Transport
    # What has come of the answer.
    _status: int
    _headers: list[Header]
    _pieces: list[bytes]
    _is_head_told: bool
    _is_framed: bool
    _is_complete: bool
    _is_reusable: bool

    def __init__(self, client: EngineClient, site: _Site) -> None:
        self.site = site
        self.idle_since = 0.0
        self._client = client
        self._ask: Ask | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._is_paused = False
        self._begin_answer()

    def begin(self, ask: Ask) -> None:
        self._ask = ask
        ask.connection = self
        self._begin_answer()
        self.transport.writelines(ask.request)
        ask.request = []

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
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._client._opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._client._closed(self)
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
            self._client._keep(self)
        else:
            self.transport.abort()
        if listener is not None:
            listener.on_end(error)

    def _let_go(self) -> Listener | None:
        ask, self._ask = self._ask, None
        if ask is None:
            return None
        ask.connection = None
        return ask.listener


class _Fetched:
    """Collects one answer."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[Whole] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: list[Header] = []
        self._body: list[bytes] = []

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes, is_last: bool) -> None:
        self._body.append(data)

    def on_end(self, error: HttpError | None) -> None:
        if self.whole.done():
            return
        if error is not None:
            self.whole.set_exception(error)
        else:
            self.whole.set_result(Whole(self._status, tuple(self._headers), b"".join(self._body)))


def _context(tls: ssl.SSLContext | bool) -> ssl.SSLContext:
    if isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.create_default_context()
    if not tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
