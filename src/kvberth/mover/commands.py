"""What the engine tells the mover. Plain data: it crosses from the scheduler's process to the workers'."""

from dataclasses import dataclass

from kvberth.protocol import TransferKey
from kvberth.protocol.events import PrefillAborted, PrefillAnnounced, PrefillFinished, RequestDeclined, RequestWaiting

__all__ = [
    "AbortRequest",
    "AnnouncePrefill",
    "AwaitRequest",
    "Command",
    "DeclineRequest",
    "EndPrefill",
    "FinishPrefill",
]


@dataclass(frozen=True, slots=True)
class AnnouncePrefill:
    """Producer: a request has arrived whose KV these transfers will want, one per consumer."""

    keys: tuple[TransferKey, ...]
    event: PrefillAnnounced


@dataclass(frozen=True, slots=True)
class FinishPrefill:
    """Producer: its KV is complete; the engine keeps the blocks until the request is in `Results.released`."""

    keys: tuple[TransferKey, ...]
    event: PrefillFinished


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Producer: it was aborted; the engine keeps the blocks until the request is in `Results.released`."""

    keys: tuple[TransferKey, ...]
    event: PrefillAborted


@dataclass(frozen=True, slots=True)
class AwaitRequest:
    """Consumer: a request waits for its KV, until it is in `Results.received`.

    Attributes:
        host, port: of the producer's control channel for rank 0; rank r listens on port + r.
    """

    key: TransferKey
    host: str
    port: int
    event: RequestWaiting


@dataclass(frozen=True, slots=True)
class DeclineRequest:
    """Consumer: nothing is needed of the producer; let it know."""

    key: TransferKey
    host: str
    port: int
    event: RequestDeclined


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Consumer: a waiting request was aborted; its blocks stay reserved until it is in `Results.received`."""

    key: TransferKey


Command = AnnouncePrefill | FinishPrefill | EndPrefill | AwaitRequest | DeclineRequest | AbortRequest
