"""Where the time of single handoffs went, as kvberth's connector tells it in an answer.

vLLM leaves `kv_transfer_params` out of streams. So after a cell has been measured, its first requests go out once more,
at the same rate and without streaming, to modes of kvberth's: what they say explains the cell, and is in none of its
other figures.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from kvberth.bench import Plan, PlannedRequest
from kvberth.bench.client import open_session

__all__ = ["Timeline", "ask_timelines", "handoff_ms", "moving_ms"]

Timeline = Mapping[str, float]
"""Moments in seconds since the decode worker had reserved the blocks; see docs/connector.md."""

_PATIENCE_SECONDS = 60.0


async def ask_timelines(url: str, model: str, plan: Plan) -> list[dict[str, float]]:
    """Send `plan` without streaming; the timelines of the answers that have one, in the plan's order."""
    start = time.monotonic()
    async with open_session() as session:
        answers = await asyncio.gather(*(_ask(session, url, model, start, each) for each in plan.requests))
    return [timeline for answer in answers if (timeline := _timeline(answer))]


async def _ask(session: aiohttp.ClientSession, url: str, model: str, start: float, planned: PlannedRequest) -> bytes:
    """The body of the answer; empty if there is none in time, since these are not what is measured."""
    body = {
        "model": model,
        "prompt": planned.prompt_token_ids.tolist(),
        "max_tokens": planned.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    encoded = msgspec.json.encode(body)
    await asyncio.sleep(max(0.0, start + planned.arrival_seconds - time.monotonic()))
    headers = {"content-type": "application/json"}
    try:
        async with (
            asyncio.timeout(_PATIENCE_SECONDS),
            session.post(f"{url}/v1/completions", data=encoded, headers=headers) as response,
        ):
            return await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError):
        return b""


def _timeline(answer: bytes) -> dict[str, float]:
    """The moments that the answer names; empty if it names none."""
    try:
        found: Any = msgspec.json.decode(answer)["kv_transfer_params"]["transfer"]["timeline"]
        return {name: float(moment) for name, moment in found.items() if isinstance(moment, int | float)}
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
        return {}


def handoff_ms(timeline: Timeline) -> float | None:
    """From the end of the prefill to the end of the handoff: what a client waits for. None if it is not told."""
    if "prefill_done" not in timeline or "ended" not in timeline:
        return None
    return (timeline["ended"] - max(0.0, timeline["prefill_done"])) * 1000


def moving_ms(timeline: Timeline) -> float | None:
    """From the first WRITE or READ to the end of the handoff. None if it is not told."""
    if "moving" not in timeline or "ended" not in timeline:
        return None
    return (timeline["ended"] - timeline["moving"]) * 1000
