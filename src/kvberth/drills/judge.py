"""Whether each request of a drill was served as it must be. Pure functions of what came back."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvberth.bench.stream import error_message, read_answer
from kvberth.drills.client import Reply

__all__ = ["Outcome", "Verdict", "Window", "judge", "objections"]


class Outcome(StrEnum):
    """What became of a request."""

    RIGHT = "right"
    REFUSED = "refused"
    """A clear error within the deadline: an error status with an error in its body, or an error event in the stream."""
    LEFT = "left"
    """The client went away, as planned, and what it had seen was right."""
    BROKEN = "broken"
    """The connection ended in the middle, or was not made, without a word."""
    WRONG = "wrong"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, and in words why."""

    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which a fault can be felt, in seconds from the start of the traffic."""

    begin: float
    end: float

    def touches(self, reply: Reply) -> bool:
        """Whether the request was under way within it."""
        return reply.sent_seconds <= self.end and reply.ended_seconds >= self.begin


class _Choice(msgspec.Struct):
    text: str


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Completion)


def judge(reply: Reply) -> Verdict:
    """What one reply is worth."""
    if reply.is_hung:
        return Verdict(Outcome.HUNG, f"no end after {reply.ended_seconds - reply.sent_seconds:.1f} s")
    if reply.status is not None and reply.status != 200:
        return _judge_error(reply)
    return _judge_stream(reply) if reply.request.is_streamed else _judge_whole(reply)


def objections(
    replies: Sequence[Reply],
    verdicts: Sequence[Verdict],
    window: Window | None = None,
    excused: frozenset[Outcome] = frozenset(),
) -> list[str]:
    """What must not have happened, one line each.

    Args:
        excused: outcomes that requests may have that were under way within the window.
    """
    found = []
    for reply, verdict in zip(replies, verdicts, strict=True):
        if verdict.outcome in {Outcome.RIGHT, Outcome.LEFT}:
            continue
        if verdict.outcome in excused and window is not None and window.touches(reply):
            continue
        kind = "streamed" if reply.request.is_streamed else "unstreamed"
        when = f"{reply.sent_seconds:.2f} to {reply.ended_seconds:.2f} s"
        found.append(
            f"request {reply.request.index} ({reply.request.mode}, {kind}, {when}) {verdict.outcome}: {verdict.why}"
        )
    return found


def _judge_error(reply: Reply) -> Verdict:
    said = error_message(reply.body)
    try:
        is_clear = isinstance(msgspec.json.decode(reply.body), dict) and bool(said)
    except msgspec.MsgspecError:
        is_clear = False
    if reply.broken is not None or reply.has_left or not is_clear:
        return Verdict(Outcome.WRONG, f"status {reply.status} without a clear error: {said!r}")
    return Verdict(Outcome.REFUSED, f"{reply.status}: {said}")


def _judge_whole(reply: Reply) -> Verdict:
    if reply.has_left:
        return Verdict(Outcome.LEFT)
    if reply.broken is not None or reply.status is None:
        return Verdict(Outcome.BROKEN, reply.broken or "no answer")
    try:
        text = _decoder.decode(reply.body).choices[0].text
    except (msgspec.MsgspecError, IndexError) as error:
        return Verdict(Outcome.WRONG, f"200 without an answer: {error}")
    if text != reply.request.answer:
        return Verdict(Outcome.WRONG, _difference(text, reply.request.answer))
    return Verdict(Outcome.RIGHT)


def _judge_stream(reply: Reply) -> Verdict:
    answer = read_answer([(0, reply.body)])
    if not reply.request.answer.startswith(answer.text):
        return Verdict(Outcome.WRONG, _difference(answer.text, reply.request.answer))
    if answer.error is not None:
        return Verdict(Outcome.REFUSED, answer.error)
    if reply.has_left:
        return Verdict(Outcome.LEFT)
    if not answer.is_done:
        return Verdict(Outcome.BROKEN, reply.broken or "the stream ended without [DONE]")
    if answer.text != reply.request.answer:
        return Verdict(Outcome.WRONG, f"{len(answer.text)} of {len(reply.request.answer)} characters, then [DONE]")
    return Verdict(Outcome.RIGHT)


def _difference(got: str, owed: str) -> str:
    at = next((index for index, pair in enumerate(zip(got, owed, strict=False)) if pair[0] != pair[1]), len(owed))
    return f"differs from character {at} on: {got[at : at + 20]!r} for {owed[at : at + 20]!r}"
