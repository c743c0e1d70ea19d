"""Transfers in flight: planning, posting in batches, completion."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvberth.layout import LayoutError, Runs
from kvberth.protocol.ids import TransferKey
from kvberth.transport import Direction, Handle, Transport, TransportError

__all__ = ["Effort", "Flights", "Landing"]

_BATCH_DESCRIPTORS = 4096
"""Descriptors in one post: about 9 ms at the 2.2 microseconds per descriptor that NIXL needs for small pages, so that
heartbeats and other transfers are never kept for longer."""

_POSTED_AHEAD = 4
"""Batches of one transfer in flight at once, to keep the wire busy between two looks."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A transfer of which nothing is in flight any more.

    Attributes:
        error: why it failed; empty when everything has landed or posting was stopped.
    """

    key: TransferKey
    direction: Direction
    num_bytes: int
    num_descriptors: int
    error: str


@dataclass(slots=True)
class Effort:
    """What the mover's thread has done for one transfer.

    Attributes:
        post_seconds: time spent planning and posting.
        num_runs: pieces of neighbouring blocks.
    """

    post_seconds: float = 0.0
    num_runs: int = 0


@dataclass(slots=True)
class _Flight:
    key: TransferKey
    direction: Direction
    peer: str
    waiting: deque[Runs] = field(default_factory=deque)
    num_bytes: int = 0
    num_descriptors: int = 0
    effort: Effort = field(default_factory=Effort)
    posted: list[Handle] = field(default_factory=list)
    is_closed: bool = False
    error: str = ""

    @property
    def has_landed(self) -> bool:
        """Nothing is in flight, and nothing more will be."""
        return not self.posted and (bool(self.error) or (self.is_closed and not self.waiting))


class Flights:
    """All transfers that this rank has started. Used by the mover's thread only.

    Attributes:
        has_news: whether something was posted since the last `look`, which may have landed at once.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._flights: dict[TransferKey, _Flight] = {}
        self._efforts: dict[TransferKey, Effort] = {}
        self.has_news = False

    def is_moving(self) -> bool:
        """Whether anything is in flight, or about to be. A transfer that waits for its next part is not."""
        return any(flight.posted or flight.waiting or flight.has_landed for flight in self._flights.values())

    def num_waiting(self) -> int:
        """Batches of descriptors that have not been posted yet."""
        return sum(len(flight.waiting) for flight in self._flights.values())

    def extend(
        self, key: TransferKey, direction: Direction, peer: str, plan: Callable[[], Runs] | None, *, is_last: bool
    ) -> None:
        """A transfer, or the next part of one; `advance` posts it.

        Args:
            plan: what to move; it runs here so that its time counts as posting. None adds nothing.
            is_last: the landing follows when all of it has landed.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(key, direction, peer)
        flight.is_closed = flight.is_closed or is_last
        if plan is None:
            return
        began = time.perf_counter()
        try:
            runs = plan()
        except LayoutError as error:
            flight.error = str(error)
            flight.waiting.clear()
            return
        flight.waiting.extend(runs.batches(_BATCH_DESCRIPTORS))
        flight.num_bytes += runs.num_bytes
        flight.num_descriptors += len(runs)
        flight.effort.num_runs += runs.num_runs
        flight.effort.post_seconds += time.perf_counter() - began

    def stop(self, key: TransferKey) -> None:
        """Post nothing more; the landing follows once what is in flight has landed."""
        if (flight := self._flights.get(key)) is not None:
            flight.waiting.clear()
            flight.is_closed = True

    def look(self) -> None:
        """See what has landed by now; `advance` gives it out.

        To be called before the engine's commands are taken. One that takes blocks away is given before they can be
        overwritten, so whatever has been seen to land since, with other bytes, is given out behind that command.
        """
        self.has_news = False
        for flight in self._flights.values():
            self._look(flight)

    def advance(self, may_post: Callable[[str], bool] = lambda peer: True) -> Iterator[Landing]:
        """Give out what was seen to have landed, and post what can be posted.

        Args:
            may_post: whether to post to a peer now; what is for another one waits.

        At most one batch per transfer is posted in one call, so that the time between two looks at the control
        channel stays bounded; the next call follows within a millisecond.
        """
        for flight in list(self._flights.values()):
            if not flight.error and flight.waiting and len(flight.posted) < _POSTED_AHEAD and may_post(flight.peer):
                self._post(flight)
            if flight.has_landed:
                yield self._end(flight)

    def cut_off(self, peer: str) -> Iterator[Landing]:
        """Give out at once what has ended since the transport has let go of a peer."""
        for flight in list(self._flights.values()):
            if flight.peer == peer:
                self._look(flight)
                if flight.has_landed:
                    yield self._end(flight)

    def take_effort(self, key: TransferKey) -> Effort:
        """What a landed transfer took; asked once, when it has ended."""
        return self._efforts.pop(key, Effort())

    def _end(self, flight: _Flight) -> Landing:
        del self._flights[flight.key]
        self._efforts[flight.key] = flight.effort
        return Landing(flight.key, flight.direction, flight.num_bytes, flight.num_descriptors, flight.error)

    def _post(self, flight: _Flight) -> None:
        began = time.perf_counter()
        try:
            handle = self._transport.post(flight.direction, flight.peer, flight.waiting.popleft())
        except TransportError as error:
            flight.error = str(error)
            flight.waiting.clear()
        else:
            flight.posted.append(handle)
            self.has_news = True
        flight.effort.post_seconds += time.perf_counter() - began

    def _look(self, flight: _Flight) -> None:
        """Drop the handles that are done or have failed; after a failure, wait for the rest and post no more."""
        for handle in list(flight.posted):
            try:
                is_over = self._transport.is_done(handle)
            except TransportError as error:
                flight.error = flight.error or str(error)
                flight.waiting.clear()
                is_over = True
            if is_over:
                flight.posted.remove(handle)
                self._transport.release(handle)
