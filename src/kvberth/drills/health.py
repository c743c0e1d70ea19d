"""Whether the router's `/health` told the truth throughout a drill. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ROUTER", "HealthSample", "Outage", "untruths"]

ROUTER = "router"

BACK_SECONDS = 8.0
"""After an engine is back the router may take so long to find out: its probe may have just begun to wait."""


@dataclass(frozen=True, slots=True)
class HealthSample:
    """One answer of `/health`.

    Attributes:
        at: seconds from the start of the traffic.
        usable: by engine, whether the router says that it would send a request there; None if it did not answer.
    """

    at: float
    usable: Mapping[str, bool] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One process, the router perhaps, that a drill has taken away, from `begin` to `end`; times as in `HealthSample`.

    Attributes:
        back: when it served again, which for one that was started anew is later than the end.
        is_certain: the router must say so; else it may, such as of a worker that is slow.
        notice_seconds: within which it must.
    """

    name: str
    begin: float
    end: float
    back: float
    is_certain: bool
    notice_seconds: float


def untruths(samples: Sequence[HealthSample], outages: Sequence[Outage]) -> list[str]:
    """What `/health` should not have said."""
    found: dict[str, str] = {}
    for sample in samples:
        if sample.usable is None:
            if not any(each.name == ROUTER and each.begin <= sample.at <= each.back for each in outages):
                found.setdefault(ROUTER, f"/health did not answer at {sample.at:.1f} s")
            continue
        for name, is_usable in sample.usable.items():
            ours = [each for each in outages if each.name == name]
            if is_usable:
                if any(each.is_certain and each.begin + each.notice_seconds < sample.at < each.end for each in ours):
                    found.setdefault(name, f"/health still called {name} usable at {sample.at:.1f} s")
            elif not any(
                each.name in {name, ROUTER} and each.begin <= sample.at <= each.back + BACK_SECONDS for each in outages
            ):
                found.setdefault(name, f"/health called {name} unusable at {sample.at:.1f} s, without a reason")
    return list(found.values())
