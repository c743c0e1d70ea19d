"""Errors as an OpenAI client expects them: `{"error": {"message", "type", "param", "code"}}`.

What an engine itself says to a client's mistake passes through untouched; these are the router's own words. For
clients of other APIs `forms.py` puts them in other words.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar

import msgspec

from kvberth.router.answer import Header

__all__ = ["Failure", "FailureKind", "Leg", "RouterError", "without_frames"]

Leg = Literal["prefill", "decode"]

_Error = TypeVar("_Error", bound=BaseException)


class FailureKind(StrEnum):
    """Why a leg brought no usable answer."""

    UNREACHABLE = "unreachable"
    CONNECT_TIMEOUT = "connect_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a token of text
    SERVER_ERROR = "server_error"
    SILENT = "silent"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Failure:
    """One leg's failure; `detail` is for the log, because it may hold addresses that clients should not see."""

    leg: Leg
    kind: FailureKind
    detail: str

    @property
    def is_worth_another_engine(self) -> bool:
        """Whether a second engine may be tried: not after a wait that the client would have to bear twice."""
        return self.kind is not FailureKind.FIRST_TOKEN_TIMEOUT

    def as_error(self, *, is_final: bool = False) -> "RouterError":
        """The answer to the client when nothing else can be tried; if `is_final`, not by the client either."""
        match self.kind:
            case FailureKind.FIRST_TOKEN_TIMEOUT:
                return RouterError(504, f"The {self.leg} leg gave no first token in time.", code=f"{self.leg}_timeout")
            case FailureKind.CONNECT_TIMEOUT:
                message = f"The {self.leg} leg could not connect to its engine in time."
                return RouterError(504, message, code=f"{self.leg}_timeout")
            case _:
                message = f"The {self.leg} leg's engine failed."
                return RouterError(502, message, code=f"{self.leg}_failed", is_final=is_final)


class RouterError(Exception):
    """A request that ends with an error of the router's own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.is_final = is_final or status == 504

    @property
    def headers(self) -> list[Header]:
        """What tells a client whether and when to ask again.

        The `openai` and `anthropic` clients repeat whatever fails with 5xx, twice unless told otherwise. A request that
        has used up its time would use it twice more, in engines that have too much to do already; one of which several
        engines have died would be shown to others (`is_final`).
        """
        if self.retry_after_seconds is not None:
            return [("retry-after", str(self.retry_after_seconds))]
        return [("x-should-retry", "false")] if self.is_final else []

    def fields(self) -> bytes:
        """The error object alone, as JSON; its type follows from the status."""
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status < 500:
            kind = "invalid_request_error"
        else:
            kind = "server_error"
        said = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode(said)

    def body(self) -> bytes:
        """The JSON to send."""
        return msgspec.json.encode({"error": msgspec.Raw(self.fields())})


def without_frames(error: _Error) -> _Error:
    """The error, which no longer knows where it and what has led to it were raised.

    The frames of that know the request, and it the error: all of it, bodies too, would wait for the garbage collector.
    """
    severed: BaseException | None = error
    while severed is not None and severed.__traceback__ is not None:
        severed.__traceback__ = None
        severed = severed.__cause__ or severed.__context__
    return error
