"""The seam to the library that moves bytes."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NewType, Protocol

from kvberth.layout import Region, Runs

__all__ = ["Direction", "Handle", "Transport", "TransportError"]

Handle = NewType("Handle", int)
"""One posted transfer, until `release`."""


class Direction(StrEnum):
    """Whose memory is written: the peer's (WRITE) or ours (READ)."""

    WRITE = "WRITE"
    READ = "READ"


class TransportError(Exception):
    """A transfer or a peer has failed."""


class Transport(Protocol):
    """One agent: registered memory, peers, posted transfers. All calls come from one thread."""

    def register(self, regions: Sequence[Region], num_blocks: int) -> None:
        """Make `num_blocks` blocks of each region usable in transfers.

        Raises:
            TransportError: the memory cannot be registered.
        """

    def metadata(self) -> bytes:
        """What a peer passes to `add_peer`. Contains everything registered so far."""

    def add_peer(self, metadata: bytes) -> str:
        """Prepare for transfers with a peer; returns its agent's name.

        Raises:
            TransportError: the metadata is not that of a compatible agent.
        """

    def remove_peer(self, name: str, *, is_live: bool) -> None:
        """Tear our end of the connection down. What we have in flight comes to an end, done or failed.

        Over TCP nothing that either side has posted lands any more. Over shared memory and RDMA what the peer posts
        may: NIXL over UCX keeps the memory open to it.

        Args:
            is_live: whether something may be in flight, in either direction. Then connections that the peer has made
                are cut as well; and with them, since nobody can tell them apart, those of other agents of its host.

        Raises:
            TransportError: there is no such peer, or it cannot be removed.
        """

    def post(self, direction: Direction, peer: str, runs: Runs) -> Handle:
        """Start moving bytes; returns before they have arrived.

        Raises:
            TransportError: nothing was started.
        """

    def is_done(self, handle: Handle) -> bool:
        """Whether all bytes of the transfer have arrived.

        Raises:
            TransportError: the transfer failed. Of a READ nothing arrives any more.
        """

    def release(self, handle: Handle) -> None:
        """Forget a transfer that is done or has failed. It does not cancel: nothing can."""

    def progress(self) -> None:
        """Drive transfers that peers have started with our memory. Cheap; needed about once per millisecond."""

    def close(self) -> None:
        """Release everything."""
