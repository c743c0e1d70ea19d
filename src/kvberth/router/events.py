"""What can happen to a request: the events of its `Life`."""

from dataclasses import dataclass

from kvberth.router.answer import Answer
from kvberth.router.errors import Failure

__all__ = [
    "BindNow",
    "DecodeAnswered",
    "DecodeBehind",
    "DecodeFailed",
    "Event",
    "HandedOver",
    "PrefillAnswered",
    "PrefillFailed",
    "PrefillRejected",
]


@dataclass(frozen=True, slots=True)
class PrefillAnswered:
    """P is done. `transfer_params` is what its connector answered, if it did."""

    transfer_params: bytes | None


@dataclass(frozen=True, slots=True)
class PrefillRejected:
    """P found a mistake of the client's (4xx): D would find the same."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    failure: Failure


@dataclass(frozen=True, slots=True)
class DecodeAnswered:
    """D's first bytes are here, or all of them, or its error."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D brought nothing that a client should be shown, or an error that is shown only if nobody does better."""

    failure: Failure
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class DecodeBehind:
    """The prompt has been computed for a while, and D has not reserved memory for it yet."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """All of the KV that D lacked is there. `is_prefilled`: because it was computed, not because D lacked none."""

    is_prefilled: bool


@dataclass(frozen=True, slots=True)
class BindNow:
    """P will soon be done: the moment to choose D has come."""


Event = (
    BindNow
    | HandedOver
    | PrefillAnswered
    | PrefillRejected
    | PrefillFailed
    | DecodeAnswered
    | DecodeBehind
    | DecodeFailed
)
