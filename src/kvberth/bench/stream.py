"""What the bytes of a streamed completion or chat say, once all have come. No I/O and no clock.

The client keeps bytes and arrival times while it measures and leaves all decoding to this module.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

__all__ = ["Answer", "Piece", "error_message", "read_answer"]

Piece = tuple[int, bytes]
"""When some bytes came, in nanoseconds, and the bytes; they may end anywhere, in the middle of an event too."""


@dataclass(slots=True)
class Answer:
    """One streamed answer, as far as it came.

    Attributes:
        chunk_times_ns: when each chunk with a token came. As in `vllm bench serve`, its text may be empty (a token that
            ends no character), and a last chunk that has only the usage does not count. Nor does a chat's chunk that
            only names the role or the reason of the end.
        text: all of it, a chat's reasoning included.
        content: without a chat's reasoning: what its next turn is told.
        token_ids: per chunk, if the server sends ids (`return_token_ids`); else empty.
        prompt_tokens: as the server counts them; None if it does not say.
        output_tokens: as the server counts them; without its usage the ids it sent, or else the chunks.
        error: what the server said went wrong, or what in its events could not be read; None if nothing.
        is_done: the stream ended with `[DONE]`.
    """

    text: str = ""
    content: str = ""
    chunk_times_ns: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    is_done: bool = False

    @property
    def has_all_ids(self) -> bool:
        """The server has sent the id of every token that it counts."""
        return sum(map(len, self.token_ids)) == self.output_tokens


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[_TokenId] | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return (self.delta.content if self.delta else self.text) or ""

    @property
    def reasoning(self) -> str:
        return (self.delta.reasoning or self.delta.reasoning_content or "") if self.delta else ""

    @property
    def has_token(self) -> bool:
        if self.delta is None or self.token_ids or self.content or self.reasoning or self.delta.tool_calls:
            return True
        return self.delta.role is None and self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: Any = None


# RecursionError: JSON that is nested without end.
_UNREADABLE = (msgspec.MsgspecError, RecursionError)

_decoder = msgspec.json.Decoder(_Chunk)


def read_answer(pieces: Iterable[Piece]) -> Answer:
    """Decode the events in `pieces`. What a server sends wrong ends up in `error`; nothing is raised."""
    answer = Answer()
    texts: list[str] = []
    contents: list[str] = []
    usage: _Usage | None = None
    for time_ns, data in _events(pieces):
        if data == b"[DONE]":
            answer.is_done = True
            break
        try:
            chunk = _decoder.decode(data)
        except _UNREADABLE as error:
            answer.error = f"unreadable event: {error}"
            break
        if chunk.error is not None:
            answer.error = f"error in the stream: {error_message(data)}"
            break
        if chunk.choices and chunk.choices[0].has_token:
            choice = chunk.choices[0]
            answer.chunk_times_ns.append(time_ns)
            answer.token_ids.append(choice.token_ids or [])
            contents.append(choice.content)
            texts.append(choice.reasoning + choice.content)
        usage = chunk.usage or usage
        answer.kv_transfer_params = chunk.kv_transfer_params or answer.kv_transfer_params
    answer.text, answer.content = "".join(texts), "".join(contents)
    answer.output_tokens = sum(map(len, answer.token_ids)) or len(answer.chunk_times_ns)
    if usage is not None:
        answer.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            answer.output_tokens = usage.completion_tokens
    return answer


def error_message(body: bytes) -> str:
    """What an OpenAI-style error says, or else the body itself, on one line of bounded length."""
    text = body.decode(errors="replace")
    try:
        said = msgspec.json.decode(body)
    except _UNREADABLE:
        said = None
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
            text = str(said)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def _events(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The data of each event with the time at which its line was complete. Servers send one `data:` line per event."""
    rest = b""
    for time_ns, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_ns, line[5:].strip()
