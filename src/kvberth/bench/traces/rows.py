"""What a trace says, whatever its format: when, how much, and as much of the prompt as was recorded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvberth.bench.plan import Message

__all__ = [
    "BLOCK_TOKENS",
    "MOST_SECONDS",
    "MOST_TOKENS",
    "BadRow",
    "Count",
    "GivenTokens",
    "HashedBlocks",
    "RandomTokens",
    "Seconds",
    "Trace",
    "TraceRow",
    "Turn",
]

BLOCK_TOKENS = 512
"""Tokens that one of a Mooncake trace's `hash_ids` stands for."""

MOST_TOKENS = 10_000_000
"""More in one prompt or answer is no count of tokens: the column is another one, or its unit is."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
MOST_SECONDS = 1e15
"""Or milliseconds: far above those since 1970, and finite."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """A prompt of which only the length is known."""

    count: int


@dataclass(frozen=True, slots=True)
class HashedBlocks:
    """A prompt of which it is known which blocks of `BLOCK_TOKENS` tokens it shares with others; the last one may be
    cut off."""

    count: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """A prompt that is known."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        prompt: what it adds to its conversation; messages make it a chat.
        output_tokens: None if the trace does not say.
    """

    prompt: RandomTokens | HashedBlocks | GivenTokens | tuple[Message, ...]
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request, or one conversation.

    Attributes:
        line: where it stands in the file, from 1.
        seconds: when it came, from any moment on; None if the trace does not say.
        turns: at least one.
    """

    line: int
    seconds: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be sent, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of a file that were wanted.

    Attributes:
        format: one of `FORMATS`.
        rows: at least one, in the file's order.
        skipped: those between them that cannot be sent.
        time_unit: of the file's times, in words; None if it has none.
    """

    path: Path
    format: str
    rows: tuple[TraceRow, ...]
    skipped: tuple[BadRow, ...] = ()
    time_unit: str | None = None
