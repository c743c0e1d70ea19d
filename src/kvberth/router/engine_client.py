"""HTTP/1.1 to engines: connections that are kept and carry one request at a time, answers by callback.

A leg needs no more than this, and a router needs it cheap: a request costs about a fifth of what it does with a client
library that is made for everything. There are no redirects, cookies, proxies or packed bodies here, and no task for a
request whose connection stands.

No request is sent twice: who was asked once may have begun. A kept connection that its engine has closed meanwhile is
found out before anything is sent on it.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Self
from urllib.parse import urlsplit

from kvberth.router.answer import Header, Whole
from kvberth.router.engine_connection import Ask, Connection, ConnectTimeoutError, HttpError, Listener

__all__ = ["EngineClient"]

# vLLM closes a connection that was idle for 5 s. One that is younger is not closed while a request is on its way.
_IDLE_SECONDS = 2.0
_ADDRESS_SECONDS = 10.0  # for which a name's addresses are believed


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
        self._connections: set[Connection] = set()
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
    ) -> Ask:
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
        ask = Ask(listener, f"{head}\r\n".encode("latin-1") + body)
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

    def _kept(self, site: "_Site") -> Connection | None:
        """The one that was used last: those that are not needed any more grow old."""
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while site.idle:
            connection = site.idle.pop()
            if connection.idle_since >= oldest and connection.is_quiet():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, site: "_Site", ask: Ask) -> None:
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
            if connection.transport.is_closing():  # nobody has heard of that end
                ask.listener.on_end(HttpError("the engine has hung up"))
                return
            self._connections.add(connection)
            connection.begin(ask)

    async def _open(self, site: "_Site") -> Connection:
        """At the first of its addresses that takes a connection."""
        loop = asyncio.get_running_loop()
        addresses = await site.addresses()
        for address in addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(partial(self._keep, site), self._connections.discard),
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

    def _keep(self, site: "_Site", connection: Connection) -> None:
        """For the next request to the same site."""
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        site.idle.append(connection)
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


class _Site:
    """Where an engine is, and the connections there that nobody uses."""

    def __init__(self, base_url: str, tls: ssl.SSLContext | bool) -> None:
        parts = urlsplit(base_url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.host_header = parts.netloc
        self.prefix = parts.path
        self.tls = _context(tls) if parts.scheme == "https" else None
        self.idle: deque[Connection] = deque()
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
