"""What the mover tells the engine."""

from dataclasses import dataclass, field

from kvberth.protocol import EndRecord, ReportReceived
from kvberth.protocol.ids import RequestId

__all__ = ["Results", "TransferReport"]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One transfer that has ended on this side, for metrics.

    Attributes:
        post_seconds: time spent planning and posting, on the mover's thread.
        num_runs: pieces of neighbouring blocks that it was planned in; 0 on the side that does not move the bytes.
    """

    record: EndRecord
    post_seconds: float
    num_runs: int


@dataclass(slots=True)
class Results:
    """What has come out since the last take.

    Attributes:
        released: producer's requests whose blocks may be freed.
        received: consumer's requests whose wait is over.
        reports: transfers that have ended.
        heartbeats_missed: heartbeats to producers that had no answer when the next one was due.
        num_queued: commands and batches of descriptors that wait for the mover now.
    """

    released: set[RequestId] = field(default_factory=set)
    received: list[ReportReceived] = field(default_factory=list)
    reports: list[TransferReport] = field(default_factory=list)
    heartbeats_missed: int = 0
    num_queued: int = 0
