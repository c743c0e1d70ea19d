"""Deadlines of many transfers, cheap to move."""

import heapq

from kvberth.protocol.ids import TransferKey

__all__ = ["Deadlines"]


class Deadlines:
    """At most one deadline per key; O(log n) to set, O(1) to ask for the next.

    A moved deadline leaves its old entry in the heap; it is skipped when it comes up, and the heap is rebuilt when
    more than half of it is stale.
    """

    def __init__(self) -> None:
        self._current: dict[TransferKey, float] = {}
        self._heap: list[tuple[float, TransferKey]] = []

    def set(self, key: TransferKey, when: float | None) -> None:
        """Set, move or (with None) remove the deadline of `key`."""
        if when is None:
            self._current.pop(key, None)
            return
        if self._current.get(key) == when:
            return
        self._current[key] = when
        heapq.heappush(self._heap, (when, key))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(due, each) for each, due in self._current.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap:
            when, key = self._heap[0]
            if self._current.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[TransferKey]:
        """Remove and return the keys whose deadline is at or before `now`: all of them, not the first ones."""
        due: list[TransferKey] = []
        while (when := self.next()) is not None and when <= now:
            _, key = heapq.heappop(self._heap)
            del self._current[key]
            due.append(key)
        return due
