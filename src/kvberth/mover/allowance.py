"""How much of our time each peer may take. Pure arithmetic: the time is an argument."""

from collections.abc import Hashable

__all__ = ["Allowance"]

_BYTES_PER_UNIT = 1024
_KEPT = 1024
"""Above this number, those who have sent nothing for a while are forgotten now and then."""


class Allowance:
    """A token bucket per peer. A message costs one unit and one more per KiB.

    Args:
        per_second: units that come in.
        burst: units that are kept at most, and a new peer begins with.
    """

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left: dict[Hashable, tuple[float, float]] = {}  # units, and when
        self._forget_at = _KEPT

    def take(self, peer: Hashable, length_bytes: int, now: float) -> bool:
        """Whether a message of this length may be looked at; one that may not costs nothing."""
        units, since = self._left.get(peer, (self._burst, now))
        units = min(self._burst, units + (now - since) * self._per_second)
        is_allowed = units > 0
        if is_allowed:
            units -= 1 + length_bytes // _BYTES_PER_UNIT
        self._left[peer] = (units, now)
        if len(self._left) > self._forget_at:
            self._forget(now)
        return is_allowed

    def _forget(self, now: float) -> None:
        """Who would have a full bucket again is as good as new."""
        seconds = self._burst / self._per_second
        self._left = {peer: left for peer, left in self._left.items() if now - left[1] < seconds}
        self._forget_at = max(_KEPT, 2 * len(self._left))
