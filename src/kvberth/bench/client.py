"""Sends planned requests at their times, whatever has become of those before, and records what comes back.

Between the sending and the end of an answer only bytes and their times are kept; nothing is decoded meanwhile.
"""

import asyncio
import hashlib
import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvberth.bench.errors import TargetError
from kvberth.bench.records import RequestRecord
from kvberth.bench.stream import Answer, Piece, error_message, read_answer
from kvberth.bench.traffic import PlannedRequest

__all__ = ["Outgoing", "Target", "encode_request", "find_model", "open_session", "send", "send_all"]

# vLLM closes a connection that was idle for 5 s. One that is younger is not closed while a request is on its way.
_IDLE_SECONDS = 2.0
_MODELS_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test.

    Attributes:
        url: its base, without `/v1`.
        model: the name to ask for; None takes the first that `/v1/models` lists.
        headers: sent with each request; names are kept in lower case.
        timeout_seconds: the longest that one request may take.
        extra_body: further fields of each request's body, such as `{"return_token_ids": True}`.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 120.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url: {self.url!r} is no server's URL, expected something like http://127.0.0.1:8000")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds: must be above 0 and finite, not {self.timeout_seconds}")
        for name, value in self.headers.items():
            if not name or not f"{name}{value}".isprintable() or not f"{name}{value}".isascii():
                raise ValueError(f"headers: {name!r} and its value must be printable ASCII")
        object.__setattr__(self, "headers", {name.lower(): value for name, value in self.headers.items()})


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request that is ready to go."""

    planned: PlannedRequest
    body: bytes


def open_session() -> aiohttp.ClientSession:
    """The connections of one run, without a bound on their number."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"accept-encoding": "identity"},  # a compressed stream would be held back until it is worth packing
    )


async def find_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The first model that the server lists. Raises `TargetError` if it lists none or is not there."""
    url = f"{target.url}/v1/models"
    try:
        async with asyncio.timeout(_MODELS_PATIENCE_SECONDS), session.get(url, headers=target.headers) as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"{url} does not answer: {_describe(error)}") from error
    if response.status != 200:
        raise TargetError(f"{url} answered {response.status}: {error_message(body)}")
    try:
        model = msgspec.json.decode(body)["data"][0]["id"]
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        model = None
    if not isinstance(model, str):
        raise TargetError(f"{url} lists no model; name one with the setting 'model'")
    return model


def encode_request(planned: PlannedRequest, target: Target, model: str) -> Outgoing:
    """Make the body: a stream of exactly the planned number of tokens, the most likely ones."""
    body = {
        "model": model,
        "prompt": planned.prompt_token_ids.tolist(),
        "max_tokens": planned.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra_body,
    }
    return Outgoing(planned, msgspec.json.encode(body))


async def send_all(
    session: aiohttp.ClientSession,
    target: Target,
    outgoing: Sequence[Outgoing],
    *,
    start_ns: int,
    on_sent: Callable[[], None],
    on_record: Callable[[RequestRecord], None],
) -> None:
    """Send each request at its planned time after `start_ns`; returns when all have ended.

    The times are those of `time.perf_counter_ns`. On cancellation all connections are closed.
    """

    async def send_one(each: Outgoing) -> None:
        on_sent()
        on_record(await send(session, target, each, start_ns=start_ns))

    async with asyncio.TaskGroup() as group:
        for each in outgoing:
            due_ns = start_ns + round(each.planned.arrival_seconds * 1e9)
            # More than once if need be: an event loop rounds to milliseconds, and may wake early.
            while (wait_ns := due_ns - time.perf_counter_ns()) > 0:  # noqa: ASYNC110 - it waits for a time
                await asyncio.sleep(wait_ns / 1e9)
            group.create_task(send_one(each))


async def send(session: aiohttp.ClientSession, target: Target, outgoing: Outgoing, *, start_ns: int) -> RequestRecord:
    """Send one request now and read its answer to the end. Whatever fails is in the record; nothing is raised."""
    exchange = _Exchange(uuid.uuid4().hex)
    headers = {**target.headers, "content-type": "application/json", "x-request-id": exchange.request_id}
    exchange.sent_ns = time.perf_counter_ns()
    try:
        async with (
            asyncio.timeout(target.timeout_seconds),
            session.post(
                f"{target.url}/v1/completions", data=outgoing.body, headers=headers, allow_redirects=False
            ) as response,
        ):
            await exchange.receive(response)
    except TimeoutError:
        exchange.failure = f"timeout: no whole answer in {target.timeout_seconds:g} s"
    except aiohttp.ClientConnectorError as error:
        exchange.failure = f"no connection: {_describe(error)}"
    except (aiohttp.ClientError, OSError) as error:
        exchange.failure = f"broken connection: {_describe(error)}"
    return exchange.record(outgoing.planned, start_ns)


@dataclass(slots=True)
class _Exchange:
    """One request on its way: times and bytes, and what went wrong below the level of events."""

    request_id: str
    sent_ns: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    failure: str | None = None

    async def receive(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = {
            name.lower(): value for name, value in response.headers.items() if name.lower().startswith("x-kvberth")
        }
        if response.status != 200:
            self.failure = f"HTTP {response.status}: {error_message(await response.read())}"
            return
        if response.content_type != "text/event-stream":
            self.failure = f"no stream: the answer is {response.content_type}"
            return
        while piece := await response.content.readany():
            self.pieces.append((time.perf_counter_ns(), piece))

    def record(self, planned: PlannedRequest, start_ns: int) -> RequestRecord:
        answer = read_answer(self.pieces)
        times = [self._ms(time_ns) for time_ns in answer.chunk_times_ns]
        error = self._error(answer, planned.output_tokens)
        has_succeeded = error is None
        several = has_succeeded and answer.output_tokens > 1
        sent_s = (self.sent_ns - start_ns) / 1e9
        return RequestRecord(
            index=planned.index,
            request_id=self.request_id,
            planned_s=round(planned.arrival_seconds, 6),
            sent_s=round(sent_s, 6),
            late_ms=round((sent_s - planned.arrival_seconds) * 1000, 3),
            status=self.status,
            error=error,
            prompt_tokens=len(planned.prompt_token_ids) if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            ttft_ms=times[0] if times else None,
            tpot_ms=round((times[-1] - times[0]) / (answer.output_tokens - 1), 4) if several else None,
            e2e_ms=times[-1] if has_succeeded else None,
            itl_ms=[round(later - earlier, 3) for earlier, later in itertools.pairwise(times)],
            text_sha256=hashlib.sha256(answer.text.encode()).hexdigest() if has_succeeded else None,
            headers=self.headers,
            kv_transfer_params=answer.kv_transfer_params,
        )

    def _error(self, answer: Answer, wanted_tokens: int) -> str | None:
        """The first of what went wrong; what the server says of it is worth more than how the connection ended."""
        tokens = f"{answer.output_tokens} of {wanted_tokens} tokens came"
        if answer.error is not None:
            return answer.error
        if self.failure is not None:
            return f"{self.failure}; {tokens}" if self.pieces else self.failure
        if not answer.is_done:
            return f"no [DONE] at the end of the stream: {tokens}"
        if answer.output_tokens < wanted_tokens or not answer.chunk_times_ns:
            return f"short answer: {tokens}"
        return None

    def _ms(self, time_ns: int) -> float:
        return round((time_ns - self.sent_ns) / 1e6, 3)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
