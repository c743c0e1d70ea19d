"""What is to be done for a request: the actions that its `Life` asks for."""

from dataclasses import dataclass

from kvberth.router.answer import Answer
from kvberth.router.engines import Engine
from kvberth.router.errors import Failure, RouterError

__all__ = [
    "AbortDecode",
    "AbortPrefill",
    "Action",
    "AwaitMoment",
    "Deliver",
    "Refuse",
    "Retry",
    "StartDecode",
    "StartPrefill",
]


@dataclass(frozen=True, slots=True)
class StartPrefill:
    engine: Engine
    transfer_id: str
    transfer_params: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class AwaitMoment:
    """Say `BindNow` shortly before the prefill ends."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    """`transfer_params` is None where D computes the prompt itself; `attempt` counts the transfer's decode workers."""

    engine: Engine
    transfer_params: bytes | None
    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class AbortPrefill:
    pass


@dataclass(frozen=True, slots=True)
class AbortDecode:
    pass


@dataclass(frozen=True, slots=True)
class Retry:
    """A failure is being hidden from the client; operators want to know."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Deliver:
    answer: Answer


@dataclass(frozen=True, slots=True)
class Refuse:
    error: RouterError


Action = StartPrefill | AwaitMoment | StartDecode | AbortPrefill | AbortDecode | Retry | Deliver | Refuse
