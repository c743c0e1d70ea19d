"""Traces of one JSON object per line: Mooncake's, and a schema of our own for everything else."""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import msgspec

from kvberth.bench.plan import Message
from kvberth.bench.traces.rows import (
    BLOCK_TOKENS,
    BadRow,
    Count,
    GivenTokens,
    HashedBlocks,
    RandomTokens,
    Seconds,
    TraceRow,
    Turn,
)

__all__ = ["UNREADABLE", "Line", "read_custom", "read_mooncake"]

Line = tuple[int, bytes]
"""Its number in the file, from 1, and its text."""

# RecursionError: JSON that is nested without end. UnicodeError: what is not UTF-8, or half a pair of surrogates.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeError)

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _MooncakeRow(msgspec.Struct):
    """As in kvcache-ai/Mooncake, FAST25-release/traces: `timestamp` in milliseconds, a hash id per 512 tokens."""

    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None


class _CustomRow(msgspec.Struct, forbid_unknown_fields=True):
    """Our own; with `prompt` and `output_tokens` also that of `vllm bench serve --dataset-name custom`."""

    prompt: str | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)] | None = None
    output_tokens: Count | None = None
    timestamp: Seconds | None = None


def read_mooncake(lines: Iterable[Line]) -> Iterator[TraceRow | BadRow]:
    """Rows of a Mooncake trace."""
    decoder = msgspec.json.Decoder(_MooncakeRow)

    def row(number: int, text: bytes) -> TraceRow:
        said = decoder.decode(text)
        prompt: RandomTokens | HashedBlocks = RandomTokens(said.input_length)
        if said.hash_ids is not None:
            blocks = -(-said.input_length // BLOCK_TOKENS)
            if len(said.hash_ids) != blocks:
                raise msgspec.ValidationError(
                    f"hash_ids: {len(said.hash_ids)} for {said.input_length} tokens; in blocks of {BLOCK_TOKENS} "
                    f"there must be {blocks}"
                )
            prompt = HashedBlocks(said.input_length, tuple(said.hash_ids))
        return TraceRow(number, said.timestamp / 1000, (Turn(prompt, said.output_length),))

    return _rows(lines, row)


def read_custom(lines: Iterable[Line]) -> Iterator[TraceRow | BadRow]:
    """Rows of our own schema."""
    decoder = msgspec.json.Decoder(_CustomRow)

    def row(number: int, text: bytes) -> TraceRow:
        said = decoder.decode(text)
        if sum(each is not None for each in (said.prompt, said.prompt_tokens, said.prompt_token_ids)) != 1:
            raise msgspec.ValidationError("one of prompt, prompt_tokens and prompt_token_ids must be given")
        prompt: RandomTokens | GivenTokens | tuple[Message, ...]
        if said.prompt is not None:
            prompt = (Message(role="user", content=said.prompt),)
        elif said.prompt_token_ids is not None:
            prompt = GivenTokens(tuple(said.prompt_token_ids))
        else:
            assert said.prompt_tokens is not None
            prompt = RandomTokens(said.prompt_tokens)
        return TraceRow(number, said.timestamp, (Turn(prompt, said.output_tokens),))

    return _rows(lines, row)


def _rows(lines: Iterable[Line], row: Callable[[int, bytes], TraceRow]) -> Iterator[TraceRow | BadRow]:
    for number, text in lines:
        try:
            yield row(number, text)
        except UNREADABLE as error:
            yield BadRow(number, str(error))
