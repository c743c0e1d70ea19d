"""Sends one request and records what comes back.

Between the sending and the end of an answer only bytes and their times are kept; nothing is decoded meanwhile.
"""

import asyncio
import hashlib
import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from kvberth.bench.plan import PlannedRequest
from kvberth.bench.records import RequestRecord
from kvberth.bench.stream import Answer, Piece, error_message, read_answer
from kvberth.bench.target import Target, describe

__all__ = ["Outgoing", "Sent", "encode_request", "send"]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request that is ready to go."""

    planned: PlannedRequest
    body: bytes

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.planned.messages else "/v1/completions"


class Sent(NamedTuple):
    """A request that has ended.

    Attributes:
        ended_ns: when, by `time.perf_counter_ns`.
    """

    record: RequestRecord
    answer: Answer
    ended_ns: int


def encode_request(planned: PlannedRequest, target: Target, model: str, *, with_ids: bool = False) -> Outgoing:
    """Make the body: a stream of exactly the planned number of tokens, the most likely ones.

    Args:
        with_ids: ask for the ids of the answer's tokens, which vLLM sends beside their text.
    """
    prompt: dict[str, Any] = (
        {"messages": planned.messages} if planned.messages else {"prompt": planned.prompt_token_ids.tolist()}
    )
    body = {
        "model": model,
        **prompt,
        "max_tokens": planned.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"return_token_ids": True} if with_ids else {}),
        **target.extra_body,
    }
    return Outgoing(planned, msgspec.json.encode(body))


async def send(session: aiohttp.ClientSession, target: Target, outgoing: Outgoing, *, start_ns: int) -> Sent:
    """Send one request now and read its answer to the end. Whatever fails is in the record; nothing is raised.

    Args:
        start_ns: of the measurement, by `time.perf_counter_ns`.
    """
    exchange = _Exchange(outgoing, uuid.uuid4().hex)
    headers = {**target.headers, "content-type": "application/json", "x-request-id": exchange.request_id}
    cancellation = outgoing.planned.cancellation
    patience = target.timeout_seconds
    if cancellation is not None and cancellation.seconds is not None:
        patience = min(patience, cancellation.seconds)
    exchange.sent_ns = time.perf_counter_ns()
    try:
        async with (
            asyncio.timeout(patience),
            session.post(
                f"{target.url}{outgoing.path}", data=outgoing.body, headers=headers, allow_redirects=False
            ) as response,
        ):
            await exchange.receive(response)
    except TimeoutError:
        if patience < target.timeout_seconds:
            exchange.was_cancelled = True
        else:
            exchange.failure = f"timeout: no whole answer in {target.timeout_seconds:g} s"
    except aiohttp.ClientConnectorError as error:
        exchange.failure = f"no connection: {describe(error)}"
    except (aiohttp.ClientError, OSError) as error:
        exchange.failure = f"broken connection: {describe(error)}"
    ended_ns = time.perf_counter_ns()
    answer = read_answer(exchange.pieces)
    return Sent(exchange.record(answer, start_ns), answer, ended_ns)


@dataclass(slots=True)
class _Exchange:
    """One request on its way: times and bytes, and what went wrong below the level of events."""

    outgoing: Outgoing
    request_id: str
    sent_ns: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    failure: str | None = None
    was_cancelled: bool = False

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
        lines_left = self._lines_until_cancelled()
        while piece := await response.content.readany():
            self.pieces.append((time.perf_counter_ns(), piece))
            if lines_left is not None and (lines_left := lines_left - piece.count(b"\n")) <= 0:
                self.was_cancelled = True
                response.close()
                return

    def _lines_until_cancelled(self) -> int | None:
        """An event is a line and an empty one. A chat's first event names the role, and is no token."""
        cancellation = self.outgoing.planned.cancellation
        if cancellation is None or cancellation.tokens is None:
            return None
        return 2 * (cancellation.tokens + bool(self.outgoing.planned.messages))

    def record(self, answer: Answer, start_ns: int) -> RequestRecord:
        planned = self.outgoing.planned
        times = [self._ms(time_ns) for time_ns in answer.chunk_times_ns]
        was_cancelled = self.was_cancelled and not answer.is_done and answer.error is None
        error = None if was_cancelled else self._error(answer)
        has_succeeded = error is None and not was_cancelled
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
            cancelled=was_cancelled,
            follows=planned.follows,
            prompt_tokens=len(planned.prompt_token_ids) if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            ttft_ms=times[0] if times else None,
            tpot_ms=round((times[-1] - times[0]) / (answer.output_tokens - 1), 4) if several else None,
            e2e_ms=times[-1] if has_succeeded else None,
            itl_ms=[round(later - earlier, 3) for earlier, later in itertools.pairwise(times)],
            chunks=len(times),
            chunk_tokens=[len(ids) for ids in answer.token_ids] if answer.has_all_ids else [],
            text_sha256=hashlib.sha256(answer.text.encode()).hexdigest() if has_succeeded else None,
            headers=self.headers,
            kv_transfer_params=answer.kv_transfer_params,
        )

    def _error(self, answer: Answer) -> str | None:
        """The first of what went wrong; what the server says of it is worth more than how the connection ended."""
        wanted_tokens = self.outgoing.planned.output_tokens
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
