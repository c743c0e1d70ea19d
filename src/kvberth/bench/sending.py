"""Sends a plan's requests at their times, whatever has become of those before; follow-ups after their answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import numpy as np

from kvberth.bench.client import Outgoing, Sent, encode_request, send
from kvberth.bench.plan import Message, Plan, PlannedRequest
from kvberth.bench.records import RequestRecord
from kvberth.bench.stream import Answer
from kvberth.bench.target import Target

__all__ = ["Conversation", "encode_plan", "next_turn", "send_all"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request that is ready to go, and what follows its answer."""

    first: Outgoing
    later: tuple[PlannedRequest, ...] = ()


def encode_plan(plan: Plan, target: Target, model: str) -> list[Conversation]:
    """Make all bodies that are known before anything is sent: then nothing but sending is left to do."""
    return [
        Conversation(encode_request(first, target, model, with_ids=_needs_ids(first, bool(later))), tuple(later))
        for first, *later in plan.conversations()
    ]


def next_turn(before: PlannedRequest, answer: Answer, turn: PlannedRequest, due_seconds: float) -> PlannedRequest | str:
    """The whole request for `turn`, of which the plan has only what is new; or why there can be none.

    Args:
        before: the whole request that was answered.
        due_seconds: when that answer ended, from the start of the measurement.
    """
    if turn.messages:
        said = Message(role="assistant", content=answer.content)
        return replace(turn, arrival_seconds=due_seconds, messages=(*before.messages, said, *turn.messages))
    if not answer.has_all_ids:
        return "the answer before it came without token ids: the server does not know return_token_ids"
    answered = np.array([each for ids in answer.token_ids for each in ids], dtype=np.int32)
    ids = np.concatenate((before.prompt_token_ids, answered, turn.prompt_token_ids))
    return replace(turn, arrival_seconds=due_seconds, prompt_token_ids=ids)


async def send_all(
    session: aiohttp.ClientSession,
    target: Target,
    model: str,
    conversations: Sequence[Conversation],
    *,
    start_ns: int,
    on_sent: Callable[[], None],
    on_record: Callable[[RequestRecord], None],
) -> None:
    """Send each request at its planned time after `start_ns`; returns when all have ended.

    The times are those of `time.perf_counter_ns`. A request that cannot be sent, since the one it follows has failed,
    has a record too. On cancellation all connections are closed.
    """

    async def hold(conversation: Conversation) -> None:
        outgoing = conversation.first
        for number in range(len(conversation.later) + 1):
            on_sent()
            sent = await send(session, target, outgoing, start_ns=start_ns)
            on_record(sent.record)
            later = conversation.later[number:]
            if not later:
                return
            due_seconds = (sent.ended_ns - start_ns) / 1e9
            planned = _follow(outgoing.planned, sent, later[0], due_seconds)
            if isinstance(planned, str):
                for turn in later:
                    on_record(_unsent(turn, due_seconds, planned))
                return
            outgoing = encode_request(planned, target, model, with_ids=_needs_ids(planned, len(later) > 1))

    async with asyncio.TaskGroup() as group:
        for each in conversations:
            due_ns = start_ns + round(each.first.planned.arrival_seconds * 1e9)
            # More than once if need be: an event loop rounds to milliseconds, and may wake early.
            while (wait_ns := due_ns - time.perf_counter_ns()) > 0:  # noqa: ASYNC110 - it waits for a time
                await asyncio.sleep(wait_ns / 1e9)
            group.create_task(hold(each))


def _needs_ids(planned: PlannedRequest, is_followed: bool) -> bool:
    return is_followed and not planned.messages


def _follow(before: PlannedRequest, sent: Sent, turn: PlannedRequest, due_seconds: float) -> PlannedRequest | str:
    """A client that went away goes on with what it has got of the answer."""
    if sent.record.error is not None:
        return "the turn before it failed"
    return next_turn(before, sent.answer, turn, due_seconds)


def _unsent(planned: PlannedRequest, due_seconds: float, reason: str) -> RequestRecord:
    now = round(due_seconds, 6)
    return RequestRecord(
        index=planned.index,
        request_id="",
        planned_s=now,
        sent_s=now,
        late_ms=0.0,
        error=f"not sent: {reason}",
        follows=planned.follows,
        prompt_tokens=0,
    )
