"""Conversations in ShareGPT's schema: texts without times. One JSON array of entries, or an entry per line.

The length of an answer is that of its recorded text, at four characters per token: no tokenizer is at hand, and every
run must ask for the same.
"""

import math
from collections.abc import Iterable, Iterator

import msgspec

from kvberth.bench.errors import TraceError
from kvberth.bench.plan import Message
from kvberth.bench.traces.lines import UNREADABLE, Line
from kvberth.bench.traces.rows import BadRow, TraceRow, Turn

__all__ = ["CHARACTERS_PER_TOKEN", "entries_of_array", "read_sharegpt"]

CHARACTERS_PER_TOKEN = 4
"""The rule of thumb for English text."""

# As they occur in published files of this schema.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}


class _Said(msgspec.Struct):
    from_: str = msgspec.field(name="from")
    value: str


class _Entry(msgspec.Struct):
    conversations: list[_Said]


def entries_of_array(data: bytes, path: object) -> Iterator[Line]:
    """The entries of a JSON array, each with the number of the line that it begins on.

    Raises:
        TraceError: it is no JSON array.
    """
    try:
        entries = msgspec.json.decode(data, type=list[msgspec.Raw])
    except UNREADABLE as error:
        raise TraceError(f"{path}: no JSON array of conversations: {error}") from error
    position, line = 0, 1
    for entry in map(bytes, entries):
        start = data.index(entry, position)
        line += data.count(b"\n", position, start)
        yield line, entry
        line += entry.count(b"\n")
        position = start + len(entry)


def read_sharegpt(entries: Iterable[Line]) -> Iterator[TraceRow | BadRow]:
    """A row per conversation. Each question is a request; the answer that was recorded says only how long it is."""
    decoder = msgspec.json.Decoder(_Entry)
    for number, text in entries:
        try:
            yield TraceRow(number, None, _turns(decoder.decode(text).conversations))
        except UNREADABLE as error:
            yield BadRow(number, str(error))


def _turns(said: list[_Said]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    question: tuple[Message, ...] = ()
    for place, each in enumerate(said):
        role = _ROLES.get(each.from_.lower())
        if role is None:
            raise msgspec.ValidationError(f"`{each.from_[:40]}` is no known speaker - at `$.conversations[{place}]`")
        if not each.value:
            raise msgspec.ValidationError(f"an empty text - at `$.conversations[{place}]`")
        if role != _next_role(question, role, place):
            raise msgspec.ValidationError(f"question and answer do not take turns - at `$.conversations[{place}]`")
        if role == "assistant":
            turns.append(Turn(question, math.ceil(len(each.value) / CHARACTERS_PER_TOKEN)))
            question = ()
        else:
            question = (*question, Message(role=role, content=each.value))
    if question or not turns:
        raise msgspec.ValidationError("no answer to the last question" if question else "an empty conversation")
    return tuple(turns)


def _next_role(question: tuple[Message, ...], role: str, place: int) -> str:
    """Whose turn it is; a system's message may stand at the beginning."""
    if role == "system" and place == 0:
        return role
    return "assistant" if question and question[-1].role == "user" else "user"
