"""ZeroMQ's bytes as frames, and what a meddler does to them. No I/O and no clock.

ZMTP 3.x (https://rfc.zeromq.org/spec/23/): 64 bytes of greeting, then frames of a flag byte, a length of one or eight
bytes and a body. Commands of ZeroMQ itself pass; a frame of ours is one control message. Of encrypted channels the same
holds: there a message that was changed, or comes twice, ends the connection.
"""

import random
from collections.abc import Iterator

import msgspec

__all__ = ["Frames", "Meddler", "Meddling"]

_GREETING_BYTES = 64
_LONG, _COMMAND = 0x02, 0x04


class Meddling(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to control messages, each on its own, in both directions.

    Attributes:
        drop, duplicate, corrupt: shares from 0 to 1.
        delay_seconds: by which each one is late; their order stays.
        is_stalled: nothing comes through while this is so, though connections are accepted and stay.
        cuts: all connections are cut, once, at the moment at which this is said.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay_seconds: float = 0.0
    is_stalled: bool = False
    cuts: bool = False


class Meddler:
    """Decides what becomes of each frame. `hits` counts the messages that did not pass as if it were not there.

    Args:
        seed: of its chances.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - not a secret
        self.meddling = Meddling()
        self.hits = 0

    def fate(self, frame: bytes) -> list[bytes]:
        """What is passed on in place of a message's frame, header included: nothing, it, another one, or it twice."""
        what = self.meddling
        if self._chance.random() < what.drop:
            passed = []
        else:
            other = self._corrupted(frame) if self._chance.random() < what.corrupt else frame
            passed = [other] * (2 if self._chance.random() < what.duplicate else 1)
        self.hits += passed != [frame] or what.delay_seconds > 0 or what.is_stalled
        return passed

    def _corrupted(self, frame: bytes) -> bytes:
        """With one byte of the body changed; the length stays, or all that follows would be lost."""
        header = _header_bytes(frame[0])
        if len(frame) == header:
            return frame
        at = self._chance.randrange(header, len(frame))
        return frame[:at] + bytes([frame[at] ^ self._chance.randrange(1, 256)]) + frame[at + 1 :]


class Frames:
    """Cuts one direction of a connection into pieces that may be passed on apart. Those of the greeting come as they
    are: each side waits for the beginning of the other's before it sends the rest of its own.
    """

    def __init__(self) -> None:
        self._greeting_left = _GREETING_BYTES
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Pairs (piece, whether it is a control message): parts of the greeting, then whole frames with headers."""
        self._buffer += data
        if self._greeting_left and self._buffer:
            greeting = self._take(min(self._greeting_left, len(self._buffer)))
            self._greeting_left -= len(greeting)
            yield greeting, False
        while self._buffer:
            header = _header_bytes(self._buffer[0])
            if len(self._buffer) < header:
                return
            length = header + int.from_bytes(self._buffer[1:header], "big")
            if len(self._buffer) < length:
                return
            frame = self._take(length)
            yield frame, not frame[0] & _COMMAND

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


def _header_bytes(flags: int) -> int:
    return 9 if flags & _LONG else 2
