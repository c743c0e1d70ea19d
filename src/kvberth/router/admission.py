"""Who may come in: so many requests at once, so many more that wait for a place, in the order of their coming. Pure.

How long a request that is turned away should stay away follows from how fast places became free of late.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Admission", "Place"]

_WINDOW_SECONDS = 60.0
_REMEMBERED_ENDS = 256
_LONGEST_RETRY_SECONDS = 60


@dataclass(slots=True, eq=False)
class Place:
    """One request's place, in flight or in the queue; `on_admitted` is called when it comes from there to here."""

    on_admitted: Callable[[], None]
    is_admitted: bool = False


class Admission:
    """For one thread. Who got a place gives it back with `leave`, from wherever it is then."""

    def __init__(self, max_in_flight: int, max_queue: int) -> None:
        self.in_flight = 0
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._queue: dict[Place, None] = {}
        self._busy_since = 0.0
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def arrive(self, now: float, on_admitted: Callable[[], None]) -> Place | None:
        """A place in flight or, behind all who wait, in the queue; None where both are full."""
        place = Place(on_admitted)
        if self.in_flight < self._max_in_flight:
            if self.in_flight == 0:
                # What lies before says nothing of the pace: nobody asked for anything.
                self._busy_since = now
                self._ends.clear()
            self._admit(place)
        elif len(self._queue) < self._max_queue:
            self._queue[place] = None
        else:
            return None
        return place

    def leave(self, place: Place, now: float) -> None:
        """The request has ended, or waits no longer. The first in the queue gets what became free."""
        if not place.is_admitted:
            del self._queue[place]
            return
        self._ends.append(now)
        self.in_flight -= 1
        if self._queue:
            first = next(iter(self._queue))
            del self._queue[first]
            self._admit(first)
            first.on_admitted()

    def retry_after_seconds(self, now: float) -> int:
        """When one more could be served, if places become free as fast as they lately did: from 1 to 60 s."""
        since = max(self._busy_since, now - _WINDOW_SECONDS)
        if len(self._ends) == _REMEMBERED_ENDS:
            since = max(since, self._ends[0])
        # Where none has ended, one that ends now would be the first: the pace is at best that.
        ended = max(1, sum(end >= since for end in self._ends))
        seconds = (now - since) / ended * (len(self._queue) + 1)
        return min(max(math.ceil(seconds), 1), _LONGEST_RETRY_SECONDS)

    def _admit(self, place: Place) -> None:
        self.in_flight += 1
        place.is_admitted = True
