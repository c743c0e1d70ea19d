"""The two legs as HTTP: one function per leg, each ends in one event for the request's life.

Closing the connection is how a leg is aborted: vLLM ends a request whose client has gone, and its connector then frees
what the transfer held. Cancelling the task that runs one of these functions does that.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp

from kvberth.router.answer import Header, Streamed, Whole
from kvberth.router.engines import Engine
from kvberth.router.errors import Failure, FailureKind, Leg
from kvberth.router.events import DecodeAnswered, DecodeFailed, PrefillAnswered, PrefillFailed, PrefillRejected
from kvberth.router.forms import begins_with_failure, is_preamble, readable_error
from kvberth.router.headers import JSON, response_headers
from kvberth.router.request import take_transfer_params, without_transfer_params

__all__ = ["StreamBrokenError", "abandon", "close_stream", "open_session", "run_decode_leg", "run_prefill_leg"]

logger = logging.getLogger(__name__)

# vLLM closes a connection that was idle for 5 s. One that is younger is not closed while a request is on its way.
_IDLE_SECONDS = 2.0


class StreamBrokenError(Exception):
    """The engine went away in the middle of its answer."""


class _ResponseBytes:
    """The bytes of a response as they come."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse) -> None:
        self._engine = engine
        self._response = response
        engine.on_silent[self] = response.close  # which ends a read that waits

    async def receive(self) -> bytes:
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if self._engine.is_ready:
                self._engine.mark_unready(_describe(error))
            raise StreamBrokenError(f"{self._engine.url}: {_describe(error)}") from error
        self._engine.heard_at = time.monotonic()
        return chunk

    def close(self) -> None:
        self._engine.on_silent.pop(self, None)
        self._response.close()


def open_session(
    connect_timeout_seconds: float, *, api_key: str | None = None, tls: ssl.SSLContext | bool = True
) -> aiohttp.ClientSession:
    """The connection pool for all that engines are asked. Its size is unbounded: `max_in_flight` bounds what comes in.

    `api_key` goes with every request. `tls` is what certificates of https engines are checked against; False: nothing.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=tls),
        # `connect` and not `sock_connect`: the name's resolution counts too.
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_seconds),
        headers={"authorization": f"Bearer {api_key}"} if api_key is not None else None,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Content-Type", "User-Agent"),
    )


async def run_prefill_leg(
    session: aiohttp.ClientSession,
    engine: Engine,
    path: str,
    *,
    headers: list[Header],
    body: bytes,
    first_token_timeout_seconds: float,
) -> PrefillAnswered | PrefillRejected | PrefillFailed:
    """P's leg from request to answer. The answer is one token that nobody reads, and the transfer's parameters."""
    clock = asyncio.timeout(first_token_timeout_seconds)
    try:
        async with (
            clock,
            _ending_with(engine, clock),
            session.post(engine.url + path, data=BytesIO(body), headers=headers, allow_redirects=False) as response,
        ):
            answer = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        return PrefillFailed(_failure("prefill", engine, error))
    engine.heard_at = time.monotonic()
    if response.status == 200:
        return PrefillAnswered(take_transfer_params(answer))
    if 400 <= response.status < 500:
        return PrefillRejected(Whole(response.status, response_headers(response.headers.items()), answer))
    return PrefillFailed(Failure("prefill", FailureKind.SERVER_ERROR, f"{engine.url} answered {response.status}"))


async def run_decode_leg(
    session: aiohttp.ClientSession,
    engine: Engine,
    path: str,
    *,
    headers: list[Header],
    body: bytes,
    clock: asyncio.Timeout,
) -> DecodeAnswered | DecodeFailed:
    """D's leg up to its first bytes (a stream) or to its end (everything else).

    vLLM sends the head of a stream before it has scheduled the request, and of Responses two events as well, so these
    prove nothing: until the first bytes behind them the answer may still come from somewhere else. Those may be an
    error. The caller owns the stream and closes it, and sets the `clock` for its first bytes.
    """
    response: aiohttp.ClientResponse | None = None
    try:
        async with clock, _ending_with(engine, clock):
            # Where P's leg has just begun, its request goes out first: D waits for P, and nobody for D's request.
            await asyncio.sleep(0)
            response = await session.post(engine.url + path, data=BytesIO(body), headers=headers, allow_redirects=False)
            is_stream = response.status == 200 and response.content_type == "text/event-stream"
            content = await (_first_bytes(response, path) if is_stream else response.read())
    except (aiohttp.ClientError, OSError) as error:
        if response is not None:
            response.close()
        return DecodeFailed(_failure("decode", engine, error))
    except asyncio.CancelledError:
        if response is not None:
            response.close()
        raise
    engine.heard_at = time.monotonic()
    if response.status == 200 and not content:
        response.close()
        return DecodeFailed(Failure("decode", FailureKind.UNREACHABLE, f"{engine.url} answered 200 and nothing else"))
    kept = response_headers(response.headers.items())
    if response.status >= 500:
        headers_without_type = tuple(header for header in kept if header[0] != "content-type")
        said = readable_error(path, response.status, content, leg="decode")
        failure = Failure("decode", FailureKind.SERVER_ERROR, f"{engine.url} answered {response.status}")
        return DecodeFailed(failure, Whole(response.status, (*headers_without_type, JSON), said))
    if not is_stream:
        return DecodeAnswered(Whole(response.status, kept, without_transfer_params(content)))
    stream = Streamed(response.status, kept, content, _ResponseBytes(engine, response))
    if begins_with_failure(content):
        failure = Failure("decode", FailureKind.SERVER_ERROR, f"{engine.url} began its stream with an error")
        return DecodeFailed(failure, stream)
    return DecodeAnswered(stream)


async def _first_bytes(response: aiohttp.ClientResponse, path: str) -> bytes:
    """A stream up to the first bytes that say something of the answer."""
    content = await response.content.readany()
    while is_preamble(path, content) and (more := await response.content.readany()):
        content += more
    return content


async def abandon(leg: asyncio.Task[Any]) -> None:
    """End a leg and its connection, whatever it is at; returns when both are gone."""
    leg.cancel()
    await asyncio.wait({leg})
    if leg.cancelled():
        return
    if error := leg.exception():
        logger.error("a leg ended in an unexpected error", exc_info=error)
        return
    close_stream(leg.result())


def close_stream(ended: object) -> None:
    """Close the stream that a leg's result holds, if it holds one."""
    match ended:
        case DecodeAnswered(Streamed(rest=rest)) | DecodeFailed(answer=Streamed(rest=rest)):
            rest.close()


@asynccontextmanager
async def _ending_with(engine: Engine, clock: asyncio.Timeout) -> AsyncIterator[None]:
    """Within `clock`: let its time be up as soon as the engine is found to answer nobody."""
    loop = asyncio.get_running_loop()
    is_silent = False

    def give_up() -> None:
        nonlocal is_silent
        if not clock.expired():  # one whose time is up already cannot be set anew
            is_silent = True
            clock.reschedule(loop.time())

    key = object()
    engine.on_silent[key] = give_up
    try:
        yield
    except asyncio.CancelledError as error:
        if is_silent:
            raise _SilentError from error
        raise
    finally:
        del engine.on_silent[key]


class _SilentError(aiohttp.ClientError):
    """The engine answers nobody any more."""


def _failure(leg: Leg, engine: Engine, error: Exception) -> Failure:
    if isinstance(error, _SilentError):
        return Failure(leg, FailureKind.SILENT, f"{engine.url} answers nobody")
    detail = f"{engine.url}: {_describe(error)}"
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
        # Slow is not gone: an engine with a long queue stays in service.
        return Failure(leg, FailureKind.FIRST_TOKEN_TIMEOUT, f"{engine.url}: nothing came in time")
    # Whoever refuses, resets or hangs up is gone for now; the watch finds out when it is back.
    engine.mark_unready(_describe(error))
    has_timed_out = isinstance(error, aiohttp.ConnectionTimeoutError)
    return Failure(leg, FailureKind.CONNECT_TIMEOUT if has_timed_out else FailureKind.UNREACHABLE, detail)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
