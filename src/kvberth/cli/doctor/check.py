"""What a probe returns. Knows no probe and no way of printing."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "Status", "fail", "ok", "warn"]


class Status(StrEnum):
    """`warn`: works, but not for everybody or not well. `fail`: engines or router cannot run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One row.

    Attributes:
        name: what was looked at.
        status: the verdict.
        found: the fact that it rests on.
        advice: what to do about it; None where it is ok.
    """

    name: str
    status: Status
    found: str
    advice: str | None = None


def ok(name: str, found: str) -> Check:
    """A row that asks nothing of anybody."""
    return Check(name, Status.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    """A row about something that may matter."""
    return Check(name, Status.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    """A row about something that must be put right first."""
    return Check(name, Status.FAIL, found, advice)
