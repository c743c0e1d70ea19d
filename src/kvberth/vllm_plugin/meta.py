"""What crosses between the scheduler's half of the connector and the workers'."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvberth.mover import AdvancePrefill, Command

__all__ = ["SchedulerMeta", "TransferOutcome", "WorkerMeta"]


@dataclass
class SchedulerMeta(KVConnectorMetadata):
    """One step's commands for the movers of all ranks.

    Attributes:
        advances: what the step's forward pass will have computed; given to the movers behind it.
        has_forward: whether the step computes anything.
    """

    commands: list[Command] = field(default_factory=list)
    advances: list[AdvancePrefill] = field(default_factory=list)
    has_forward: bool = True


@dataclass(frozen=True)
class TransferOutcome:
    """How a request's wait ended, for its response."""

    ok: bool
    reason: str
    detail: str
    timeline: dict[str, Any] | None = None

    def for_response(self) -> dict[str, Any]:
        """What a decode worker's response says of its handoff; moments in seconds, to the microsecond."""
        return {"ok": self.ok, "reason": self.reason, "detail": self.detail, "timeline": self.timeline}


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """One step's outcomes by request; with several ranks a failure of any is the request's."""

    outcomes: dict[str, TransferOutcome] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMeta":
        """Join the outcomes of two ranks."""
        assert isinstance(other, WorkerMeta)
        joined = dict(self.outcomes)
        for request_id, outcome in other.outcomes.items():
            if request_id not in joined or not outcome.ok:
                joined[request_id] = outcome
        return WorkerMeta(joined)
