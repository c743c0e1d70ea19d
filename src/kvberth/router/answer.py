"""An engine's answer on its way to the client: whole, or as a stream that has shown its first bytes.

A stream is passed on byte for byte, but only up to the end of an event: where the engine dies in the middle of one,
the client gets no half event, so that the error event behind it can be read. An event larger than all sense is not
waited for.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

__all__ = ["Answer", "Header", "StreamBrokenError", "StreamSource", "Streamed", "Whole", "WholeEvents"]

Header = tuple[str, str]

_LARGEST_EVENT_BYTES = 8 * 1024 * 1024  # the token ids of a prompt of a million
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class StreamBrokenError(Exception):
    """The engine went away in the middle of its answer."""


class StreamSource(Protocol):
    """The rest of a stream."""

    def pass_to(
        self, take: Callable[[bytes, bool], None], tell_end: Callable[[StreamBrokenError | None], None]
    ) -> None:
        """What comes goes to `take`, and whether it is the last, the end to `tell_end`, with why if it has broken."""
        ...

    def pause(self) -> None:
        """Read no more from the engine, until `resume`."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None:
        """Abort it at once. Neither of the two is called any more."""
        ...


class Whole(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int
    headers: tuple[Header, ...]
    body: bytes


class Streamed(msgspec.Struct, frozen=True):
    """A response of server-sent events; `first` are the bytes that have come already, `rest` follows."""

    status: int
    headers: tuple[Header, ...]
    first: bytes
    rest: StreamSource


Answer = Whole | Streamed


class WholeEvents:
    """Cuts a stream where events end. `rest` is the half event that has come so far."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def cut(self, chunk: bytes) -> bytes:
        """The events that end with this chunk, perhaps none."""
        if self.rest:
            chunk = self.rest + chunk
            self.rest = b""
        elif chunk.endswith(b"\n\n"):  # as nearly all chunks of an engine do
            return chunk
        end = len(chunk) if len(chunk) > _LARGEST_EVENT_BYTES else _end_of_events(chunk)
        self.rest = chunk[end:]
        return chunk[:end]


def _end_of_events(data: bytes) -> int:
    if data.endswith(_EVENT_ENDS):
        return len(data)
    return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
