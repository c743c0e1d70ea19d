"""What is to be done for a request: the actions that its `Life` asks for."""

import msgspec

from kvberth.router.answer import Answer
from kvberth.router.engines import Engine
from kvberth.router.errors import Failure, RouterError

__all__ = [
    "AbortDecode",
    "AbortPrefill",
    "Action",
    "Deliver",
    "Refuse",
    "Retry",
    "StartDecode",
    "StartPrefill",
]


class StartPrefill(msgspec.Struct, frozen=True):
    engine: Engine
    transfer_id: str
    transfer_params: bytes
    reason: str


class StartDecode(msgspec.Struct, frozen=True):
    """`transfer_params` is None where D computes the prompt itself; `attempt` counts the transfer's decode workers."""

    engine: Engine
    transfer_params: bytes | None
    reason: str
    attempt: int = 0


class AbortPrefill(msgspec.Struct, frozen=True):
    pass


class AbortDecode(msgspec.Struct, frozen=True):
    pass


class Retry(msgspec.Struct, frozen=True):
    """A failure is being hidden from the client; operators want to know."""

    failure: Failure


class Deliver(msgspec.Struct, frozen=True):
    answer: Answer


class Refuse(msgspec.Struct, frozen=True):
    error: RouterError


Action = StartPrefill | StartDecode | AbortPrefill | AbortDecode | Retry | Deliver | Refuse
