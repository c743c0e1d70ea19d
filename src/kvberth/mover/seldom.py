"""For lines of a log that somebody else can cause: at most one in ten seconds, which says how many it stands for."""

__all__ = ["Seldom"]

_SECONDS = 10.0


class Seldom:
    """Counts occasions."""

    def __init__(self) -> None:
        self._count = 0
        self._next = 0.0

    def count(self, now: float) -> int:
        """One more; 0 if nothing is to be said now, else how many there were since something was said."""
        self._count += 1
        if now < self._next:
            return 0
        self._next = now + _SECONDS
        counted, self._count = self._count, 0
        return counted
