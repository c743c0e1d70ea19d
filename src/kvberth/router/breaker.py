"""A circuit breaker: keeps requests away from an engine that has failed several in a row. No I/O and no clock.

    CLOSED -- 3 failures in a row --> OPEN -- its pause is over, a request enters --> HALF_OPEN
    HALF_OPEN -- that request fails --> OPEN, with twice the pause
    HALF_OPEN -- as long a pause without an end of it --> one more request
    any state -- a success --> CLOSED

It is for engines that answer badly. An engine that is gone is taken out at once, by `Engine.mark_unready`.
"""

from enum import Enum, StrEnum, auto

__all__ = ["Breaker", "BreakerState", "Outcome"]

_FAILURES_IN_A_ROW = 3
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(Enum):
    """What one leg proved of its engine. Neither a leg that was cut short nor a slow one proves anything."""

    SUCCESS = auto()
    FAILURE = auto()
    UNDECIDED = auto()


class Breaker:
    """One engine's breaker; `now` is in seconds on any one clock."""

    __slots__ = ("_pause_seconds", "failures", "retry_at", "state")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.retry_at = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def allows(self, now: float) -> bool:
        """Whether a request may be sent: always while closed, otherwise one whenever the pause is over."""
        return self.state is BreakerState.CLOSED or now >= self.retry_at

    def enter(self, now: float) -> bool:
        """A request is sent. True if it is the one that finds out whether the engine is well again."""
        is_probe = self.state is not BreakerState.CLOSED and self.allows(now)
        if is_probe:
            self.state = BreakerState.HALF_OPEN
            # A long answer that is not streamed says nothing for minutes: the engine need not wait for its end.
            self.retry_at = now + self._pause_seconds
        return is_probe

    def report(self, outcome: Outcome, now: float, *, is_probe: bool) -> None:
        """A request has ended; `is_probe` is what `enter` said of it.

        Requests from before the breaker opened may still fail: they prove nothing new.
        """
        if outcome is Outcome.SUCCESS:
            self.state = BreakerState.CLOSED
            self.failures = 0
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        elif self.state is BreakerState.CLOSED and outcome is Outcome.FAILURE:
            self.failures += 1
            if self.failures >= _FAILURES_IN_A_ROW:
                self._open(now + self._pause_seconds)
        elif self.state is BreakerState.HALF_OPEN and is_probe:
            if outcome is Outcome.FAILURE:
                self.failures += 1
                self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
                self._open(now + self._pause_seconds)
            else:
                self._open(now)  # the next request finds out

    def _open(self, retry_at: float) -> None:
        self.state = BreakerState.OPEN
        self.retry_at = retry_at
