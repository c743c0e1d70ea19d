"""What is sent, to the last token and before anything is sent. Types without I/O and clock."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Cancellation", "Message", "Plan", "PlannedRequest", "TokenIds", "draw_cancellations"]

TokenIds = npt.NDArray[np.int32]


class Message(msgspec.Struct, frozen=True):
    """One message of a chat, as OpenAI's API has it."""

    role: str
    content: str


class Cancellation(NamedTuple):
    """When a client goes away before its answer has ended; one of the two is set.

    Attributes:
        tokens: after so many chunks of the answer.
        seconds: so long after the sending, if the answer has not ended by then.
    """

    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRequest:
    """One request to be sent.

    Attributes:
        index: its place in the plan, from 0.
        arrival_seconds: when to send it, from the start of the measurement; of no meaning for a follow-up, which is due
            when the answer before it has ended.
        prompt_token_ids: a completion's prompt, of shape (tokens,); read-only. A follow-up's come after the earlier
            prompts and answers of its conversation.
        output_tokens: how many tokens the answer must have.
        messages: a chat's messages, in place of token ids; a follow-up's come after those of its conversation.
        follows: the index of the request whose answer must have come before.
        cancellation: when its client goes away; None for one that waits for the whole answer.
    """

    index: int
    arrival_seconds: float
    prompt_token_ids: TokenIds
    output_tokens: int
    messages: tuple[Message, ...] = ()
    follows: int | None = None
    cancellation: Cancellation | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Traffic, and what is sent before it to warm the servers up.

    Attributes:
        requests: by index. A follow-up comes right behind what it follows; the others are in the order of their
            arrival.
    """

    requests: tuple[PlannedRequest, ...]
    warmup: tuple[PlannedRequest, ...] = ()

    def sha256(self) -> str:
        """Of all that the plan says: equal for equal traffic, wherever it was drawn."""
        digest = hashlib.sha256()
        for each in (*self.requests, *self.warmup):
            told = (each.index, each.arrival_seconds, each.output_tokens, each.messages)
            digest.update(msgspec.json.encode((*told, each.follows, each.cancellation)))
            digest.update(each.prompt_token_ids.tobytes())
        return digest.hexdigest()

    def conversations(self) -> Iterator[tuple[PlannedRequest, ...]]:
        """The requests, each with its follow-ups."""
        turns: list[PlannedRequest] = []
        for each in self.requests:
            if each.follows is None and turns:
                yield tuple(turns)
                turns = []
            turns.append(each)
        if turns:
            yield tuple(turns)


def draw_cancellations(
    seed: np.random.SeedSequence, output_tokens: Sequence[int], *, share: float, seconds: float | None
) -> list[Cancellation | None]:
    """Choose who goes away, and when: evenly within the answer or, if `seconds` is given, within these seconds.

    Request i depends on the seed and i only. An answer of one token has no middle, and is left alone if it is counted.
    """
    draws = np.random.default_rng(seed).random((len(output_tokens), 2))

    def cancellation(tokens: int, chance: float, moment: float) -> Cancellation | None:
        if chance >= share:
            return None
        if seconds is not None:
            return Cancellation(seconds=moment * seconds)
        return Cancellation(tokens=1 + int(moment * (tokens - 1))) if tokens > 1 else None

    return [
        cancellation(tokens, float(chance), float(moment))
        for tokens, (chance, moment) in zip(output_tokens, draws, strict=True)
    ]
