"""What the engine tells the mover. Plain data: it crosses from the scheduler's process to the workers'."""

from dataclasses import dataclass
from typing import Protocol

from kvberth.protocol import TransferKey
from kvberth.protocol.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    RequestDeclined,
    RequestWaiting,
)

__all__ = [
    "AbortRequest",
    "AdvancePrefill",
    "AnnouncePrefill",
    "AwaitRequest",
    "Command",
    "DeclineRequest",
    "EndPrefill",
    "Fence",
    "FinishPrefill",
    "PrefillCommand",
    "RestartPrefill",
    "SchedulePrefill",
]


@dataclass(frozen=True, slots=True)
class AnnouncePrefill:
    """Producer: a request has arrived whose KV these transfers will want, one per consumer."""

    keys: tuple[TransferKey, ...]
    event: PrefillAnnounced


class Fence(Protocol):
    """Behind a forward pass: done when all that it wrote is in memory. Any thread may ask."""

    def query(self) -> bool:
        """Whether it is."""
        ...


@dataclass(frozen=True, slots=True)
class AdvancePrefill:
    """Producer: more of its KV will be in memory, as soon as the fence says so; None where it is already."""

    keys: tuple[TransferKey, ...]
    event: PrefillAdvanced
    fence: Fence | None = None


@dataclass(frozen=True, slots=True)
class SchedulePrefill:
    """Producer: a step begins, after which so many tokens of the prompt will have been computed. For who watches."""

    keys: tuple[TransferKey, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RestartPrefill:
    """Producer: its blocks were taken away; it will be computed anew."""

    keys: tuple[TransferKey, ...]
    event: PrefillRestarted


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
        identity: of the producer (see `Address`).
    """

    key: TransferKey
    host: str
    port: int
    event: RequestWaiting
    identity: str = ""


@dataclass(frozen=True, slots=True)
class DeclineRequest:
    """Consumer: nothing is needed of the producer; let it know."""

    key: TransferKey
    host: str
    port: int
    event: RequestDeclined
    identity: str = ""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Consumer: a waiting request was aborted; its blocks stay reserved until it is in `Results.received`."""

    key: TransferKey


PrefillCommand = AnnouncePrefill | AdvancePrefill | RestartPrefill | FinishPrefill | EndPrefill
Command = PrefillCommand | SchedulePrefill | AwaitRequest | DeclineRequest | AbortRequest
