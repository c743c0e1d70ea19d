"""When to choose the decode worker. Pure: progress and times in, a moment out.

Early, at the request's arrival, the decode worker reserves memory for the whole of the prefill, and is chosen on load
that is old when it begins to decode. Late, behind the prefill, it is chosen on fresh load, and the client waits for the
handoff. Just in time is shortly before the prefill ends: as much before as a decode worker needs to be ready.
"""

import math
from enum import StrEnum

import msgspec

__all__ = ["Binding", "JustInTime", "Pace", "PrefillProgress"]

_WEIGHT = 0.2
"""Of the newest observation in a running mean."""

_REMEMBERED_TOKENS = 16384
"""A prefill worker's pace is that of about so many tokens; older ones fade."""


class Binding(StrEnum):
    """When the decode worker is chosen."""

    EARLY = "early"
    JIT = "jit"
    LATE = "late"
    AUTO = "auto"
    """One of the others, chosen for each request."""


class PrefillProgress(msgspec.Struct, frozen=True):
    """What a prefill worker says of one prompt; see `kvberth.protocol.messages.Progress`."""

    num_tokens: int
    scheduled_tokens: int
    done_tokens: int
    is_registered: bool
    is_handed_over: bool = False

    @property
    def is_complete(self) -> bool:
        """All of the prompt has been computed."""
        return 0 < self.num_tokens <= self.done_tokens


class Pace:
    """What one prefill worker and the decode workers behind it have needed lately.

    Attributes:
        setup_seconds: from the choice of a decode worker, its load asked for, to its registration.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.setup_seconds = 0.02

    @property
    def tokens_per_second(self) -> float | None:
        """Of one prompt while its steps run, others in the same steps included; None before the first.

        Of tokens and times summed, not a mean of rates: word of several steps may come at once, of the first too late
        and of the others in no time.
        """
        return self._tokens / self._seconds if self._seconds else None

    def saw_step(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of a prompt."""
        if num_tokens > 0 and seconds > 0:
            kept = math.exp(-num_tokens / _REMEMBERED_TOKENS)
            self._tokens = kept * self._tokens + num_tokens
            self._seconds = kept * self._seconds + seconds

    def saw_setup(self, seconds: float) -> None:
        """A decode leg has been sent, and has registered so long after."""
        self.setup_seconds += _WEIGHT * (seconds - self.setup_seconds)


class JustInTime:
    """One request whose decode worker has yet to be chosen.

    Args:
        pace: of its prefill worker; what is seen here is added to it.
        margin_seconds: earlier than the setup time needs, for what cannot be foreseen.
    """

    def __init__(self, pace: Pace, margin_seconds: float) -> None:
        self._pace = pace
        self._margin = margin_seconds
        self._latest = PrefillProgress(0, 0, 0, is_registered=False)
        self._step_began: float | None = None
        self._sent_at: float | None = None
        self.bind_at: float | None = None

    def told(self, progress: PrefillProgress, now: float) -> None:
        """The prefill worker says how far it is; `bind_at` is the moment to bind, None while the request is queued."""
        before, self._latest = self._latest, progress
        if progress.is_registered and not before.is_registered and self._sent_at is not None:
            self._pace.saw_setup(now - self._sent_at)
        if progress.done_tokens > before.done_tokens and self._step_began is not None:
            self._pace.saw_step(progress.done_tokens - before.done_tokens, now - self._step_began)
            self._step_began = now  # the next step has begun behind this one
        if progress.scheduled_tokens > before.scheduled_tokens and before.scheduled_tokens <= before.done_tokens:
            self._step_began = now
        self.bind_at = self._moment(now)

    def sent(self, now: float) -> None:
        """The decode leg is on its way."""
        self._sent_at = now

    def _moment(self, now: float) -> float | None:
        progress = self._latest
        if progress.scheduled_tokens == 0 and progress.done_tokens == 0:
            return None
        rate = self._pace.tokens_per_second
        if rate is None:
            return now  # nothing is known of this worker yet
        began = self._step_began if self._step_began is not None else now
        ends = began + (progress.num_tokens - progress.done_tokens) / rate
        return ends - self._pace.setup_seconds - self._margin
