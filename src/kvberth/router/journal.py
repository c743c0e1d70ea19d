"""The timelines of the requests that are served now and of the last ones that were. No I/O and no clock."""

from collections import deque

from kvberth.router.timeline import Timeline

__all__ = ["Journal"]

_RECENT = 1000
"""A timeline of ten events takes about 3 KB."""


class Journal:
    """For the event loop's thread. `ended` counts all that have."""

    def __init__(self, recent: int = _RECENT) -> None:
        self._in_flight: dict[Timeline, None] = {}
        self._recent: deque[Timeline] = deque(maxlen=recent)
        self.ended = 0

    @property
    def in_flight(self) -> list[Timeline]:
        """Those that have not ended, oldest first."""
        return list(self._in_flight)

    @property
    def recent(self) -> list[Timeline]:
        """Those that ended last, newest first."""
        return list(reversed(self._recent))

    def begin(self, timeline: Timeline) -> None:
        self._in_flight[timeline] = None

    def end(self, timeline: Timeline) -> None:
        """It has got its `end`, and is kept for a while."""
        del self._in_flight[timeline]
        self._recent.append(timeline)
        self.ended += 1

    def find(self, request_id: str) -> Timeline | None:
        """The newest request with this id; clients choose ids, and may use one again."""
        for timelines in (reversed(self._in_flight), reversed(self._recent)):
            for timeline in timelines:
                if timeline.request_id == request_id:
                    return timeline
        return None
