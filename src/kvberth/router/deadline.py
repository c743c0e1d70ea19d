"""How long a request may take, and what took the time of one that took too long. Pure."""

import math
from dataclasses import dataclass

from kvberth.router.errors import RouterError
from kvberth.router.headers import TIMEOUT

__all__ = ["Spent", "allowed_seconds", "queue_timeout"]


def allowed_seconds(asked: str | None, limit_seconds: float | None) -> float | None:
    """The time that a request gets: what its client `asked` in the header, but not above the router's own limit.

    Raises `RouterError` (400) for a header that is no time.
    """
    if asked is None:
        return limit_seconds
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        message = f"{TIMEOUT} must be a number of seconds above 0, got {asked!r}."
        raise RouterError(400, message, code="invalid_timeout", param=TIMEOUT)
    return seconds if limit_seconds is None else min(seconds, limit_seconds)


def queue_timeout(allowed_seconds: float) -> RouterError:
    """A request whose time was up before it had a place."""
    message = f"The request was to take no more than {allowed_seconds:g} s, and waited that long for its turn."
    return RouterError(504, message, code="queue_timeout")


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a request's time went until its deadline. Both legs at once is prefill's time: decode waits for it."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float

    def timeout(self, allowed_seconds: float) -> RouterError:
        """The 504, charged to what used most of the time; it need not be what was waited for at the end."""
        shares = {"prefill": self.prefill_seconds, "decode": self.decode_seconds, "queue": self.queue_seconds}
        culprit = max(shares, key=lambda name: shares[name])
        message = (
            f"The request was to take no more than {allowed_seconds:g} s. Queue: {self.queue_seconds:.3f} s, "
            f"prefill leg: {self.prefill_seconds:.3f} s, decode leg: {self.decode_seconds:.3f} s."
        )
        return RouterError(504, message, code=f"{culprit}_timeout")
