"""Names of things that travel between engines."""

from enum import StrEnum
from typing import NewType

import msgspec

__all__ = ["PeerName", "RequestId", "Role", "TransferKey", "TransferMode"]

RequestId = NewType("RequestId", str)
"""An engine's own name for a request; never compared across engines."""

PeerName = NewType("PeerName", str)
"""One rank of one incarnation of an engine: `engine_id/rank/incarnation`. A restarted engine is another peer."""


class Role(StrEnum):
    """Of one transfer, not of an engine: who computed the KV, and who wants it."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class TransferMode(StrEnum):
    """Who moves the bytes: in `push` the producer WRITEs, in `pull` the consumer READs."""

    PUSH = "push"
    PULL = "pull"


class TransferKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One handoff: the router's id, and which of the request's `n` consumers it is for."""

    transfer_id: str
    consumer_index: int = 0

    def __str__(self) -> str:
        return f"{self.transfer_id}#{self.consumer_index}" if self.consumer_index else self.transfer_id
