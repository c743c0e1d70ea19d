"""Sends a plan's requests at their times and keeps what comes back; `judge` says what it means.

`kvberth.bench` measures requests that are all alike and streamed; here some are not streamed, some clients leave, and
of a broken answer the text so far counts.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvberth.bench.target import open_session
from kvberth.drills.traffic import DrillRequest

__all__ = ["GRACE_SECONDS", "Reply", "TrafficClock", "send_all"]

GRACE_SECONDS = 3.0
"""After its deadline a request may take so long to bring the error; one that takes longer hangs."""


class TrafficClock:
    """Seconds since the traffic began, and when no more of it is to come."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._is_over = asyncio.Event()

    def now(self) -> float:
        return time.monotonic() - self._start

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self.now()))

    def end(self) -> None:
        """Requests that have not been sent are not sent any more."""
        self._is_over.set()

    async def await_moment(self, moment: float) -> bool:
        """Whether it has come before the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, moment - self.now())):
                await self._is_over.wait()
        return not self._is_over.is_set()


@dataclass(slots=True)
class Reply:
    """What has come of one request. Times count from the start of the traffic.

    Attributes:
        status: of the HTTP answer; None if there was none.
        body: as far as it came.
        broken: how the connection ended, if not by the end of an answer.
        has_left: the client went away, as planned.
        is_hung: nothing came to an end within deadline and grace.
    """

    request: DrillRequest
    sent_seconds: float
    ended_seconds: float = 0.0
    status: int | None = None
    body: bytes = b""
    broken: str | None = None
    has_left: bool = False
    is_hung: bool = False


async def send_all(
    url: str, model: str, requests: Iterable[DrillRequest], clock: "TrafficClock | None" = None
) -> list[Reply]:
    """Send each request to the router at its time, until the clock ends; returns when all sent ones have ended."""
    clock = clock or TrafficClock()
    tasks = []
    async with open_session() as session, asyncio.TaskGroup() as group:
        for request in requests:
            body = _body(request, model)
            if not await clock.await_moment(request.arrival_seconds):
                break
            tasks.append(group.create_task(_send(session, url, request, body, clock)))
    return [each.result() for each in tasks]


def _body(request: DrillRequest, model: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": request.is_streamed,
        }
    )


async def _send(
    session: aiohttp.ClientSession, url: str, request: DrillRequest, body: bytes, clock: "TrafficClock"
) -> Reply:
    reply = Reply(request, clock.now())
    headers = {
        "content-type": "application/json",
        "x-kvberth-mode": request.mode,
        "x-kvberth-binding": request.binding,
        "x-kvberth-timeout-seconds": f"{request.deadline_seconds:g}",
    }
    patience = request.leaves_after_seconds
    try:
        async with (
            asyncio.timeout(request.deadline_seconds + GRACE_SECONDS if patience is None else patience),
            session.post(f"{url}/v1/completions", data=body, headers=headers) as response,
        ):
            reply.status = response.status
            while piece := await response.content.readany():
                reply.body += piece
    except TimeoutError:
        reply.has_left = patience is not None
        reply.is_hung = patience is None
    except (aiohttp.ClientError, OSError) as error:
        reply.broken = f"{type(error).__name__}: {error}"
    reply.ended_seconds = clock.now()
    return reply
