"""What can happen to a request: the events of its `Life`."""

import msgspec

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


class PrefillAnswered(msgspec.Struct, frozen=True):
    """P is done. `transfer_params` is what its connector answered, if it did."""

    transfer_params: bytes | None


class PrefillRejected(msgspec.Struct, frozen=True):
    """P found a mistake of the client's (4xx): D would find the same."""

    answer: Answer


class PrefillFailed(msgspec.Struct, frozen=True):
    failure: Failure


class DecodeAnswered(msgspec.Struct, frozen=True):
    """D's first bytes are here, or all of them, or its error."""

    answer: Answer


class DecodeFailed(msgspec.Struct, frozen=True):
    """D brought nothing that a client should be shown, or an error that is shown only if nobody does better."""

    failure: Failure
    answer: Answer | None = None


class DecodeBehind(msgspec.Struct, frozen=True):
    """The prompt has been computed for a while, and D has not reserved memory for it yet."""


class HandedOver(msgspec.Struct, frozen=True):
    """All of the KV that D lacked is there. `is_prefilled`: because it was computed, not because D lacked none."""

    is_prefilled: bool


class BindNow(msgspec.Struct, frozen=True):
    """P will soon be done, or has computed the prompt and not yet answered: the moment to choose D has come."""


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
