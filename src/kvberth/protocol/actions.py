"""What a machine asks its driver to do. The driver carries them out in the order given."""

from dataclasses import dataclass

from kvberth.protocol.ends import End, Reason
from kvberth.protocol.ids import PeerName, RequestId, Role, TransferKey, TransferMode
from kvberth.protocol.messages import Message
from kvberth.protocol.timeline import Timeline

__all__ = [
    "Action",
    "EndRecord",
    "ReleaseRequest",
    "ReportReceived",
    "SendMessage",
    "StartRead",
    "StartWrite",
    "StopPosting",
]


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Put a message on the control channel to `peer`."""

    peer: PeerName
    message: Message


@dataclass(frozen=True, slots=True)
class StartWrite:
    """WRITE our blocks into the peer's. `WritesDone` follows when a transfer's last have landed, or `WritesFailed`.

    Attributes:
        local_blocks, remote_blocks: `kvberth.layout.units_of` the two block tables.
        is_last: no more are to come for this transfer.
    """

    key: TransferKey
    peer: PeerName
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class StartRead:
    """READ the peer's blocks into ours; `ReadsDone` or `ReadsFailed` follows.

    Attributes:
        local_blocks, remote_blocks: `kvberth.layout.units_of` the two block tables.
    """

    key: TransferKey
    peer: PeerName
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopPosting:
    """Post nothing more for this transfer; `...Done` or `...Failed` follows when nothing is in flight."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Producer: no transfer can touch the request's blocks any more; the engine may free them."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """Consumer: the wait of this request is over, and no transfer can touch its blocks any more.

    Attributes:
        ok: the KV cache is there. Otherwise the engine recomputes or fails, as it is configured.
        timeline: of the wait; None where it has none of its own.
    """

    request_id: RequestId
    ok: bool
    reason: Reason
    detail: str = ""
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class EndRecord:
    """A transfer has ended on this side; for metrics and logs.

    Attributes:
        num_bytes, num_descriptors: what was moved.
        seconds: from the first event of the transfer on this side to its end.
        reserved_block_seconds: blocks that D's engine kept for it, times how long; 0 on the producer.
        after_prefill_seconds: what it took beyond the prefill; None if it did not complete.
    """

    role: Role
    key: TransferKey
    mode: TransferMode | None
    end: End
    reason: Reason
    detail: str
    num_bytes: int
    num_descriptors: int
    seconds: float
    reserved_block_seconds: float = 0.0
    after_prefill_seconds: float | None = None


Action = SendMessage | StartWrite | StartRead | StopPosting | ReleaseRequest | ReportReceived | EndRecord
