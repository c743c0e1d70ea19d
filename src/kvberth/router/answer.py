"""An engine's answer on its way to the client: whole, or as a stream that has shown its first bytes.

A stream is passed on byte for byte, but only up to the end of an event: where the engine dies in the middle of one,
the client gets no half event, so that the error event behind it can be read. An event larger than all sense is not
waited for.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Answer", "ByteSource", "Header", "Streamed", "Whole", "whole_events"]

Header = tuple[str, str]

_LARGEST_EVENT_BYTES = 8 * 1024 * 1024  # the token ids of a prompt of a million
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class ByteSource(Protocol):
    """The rest of a stream. `receive` gives b"" when the engine has ended it; `close` aborts it at once."""

    async def receive(self) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete response."""

    status: int
    headers: tuple[Header, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Streamed:
    """A response of server-sent events; `first` are the bytes that have come already, `rest` follows."""

    status: int
    headers: tuple[Header, ...]
    first: bytes
    rest: ByteSource


Answer = Whole | Streamed


async def whole_events(stream: Streamed) -> AsyncGenerator[bytes]:
    """The same bytes, cut where events end. What `receive` raises passes through; a half event before that is lost."""
    pending = b""
    chunk = stream.first
    while chunk:
        pending = pending + chunk if pending else chunk
        end = len(pending) if len(pending) > _LARGEST_EVENT_BYTES else _end_of_events(pending)
        if end:
            yield pending[:end]
            pending = pending[end:]
        chunk = await stream.rest.receive()
    if pending:
        yield pending


def _end_of_events(data: bytes) -> int:
    if data.endswith(_EVENT_ENDS):  # as nearly all chunks of an engine do
        return len(data)
    return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
