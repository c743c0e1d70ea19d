"""The connector's figures in vLLM's own `/metrics`."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvberth.mover import TransferReport

__all__ = ["KVBerthPromMetrics", "KVBerthStats", "stats_of"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_POST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


@dataclass
class KVBerthStats(KVConnectorStats):
    """The transfers that ended in one step: `data["transfers"]` is a list of plain dictionaries."""

    def reset(self) -> None:
        """Forget what was collected."""
        self.data: dict[str, Any] = {"transfers": []}

    def aggregate(self, other: KVConnectorStats) -> "KVBerthStats":
        """Join with another step's, or another rank's."""
        return KVBerthStats({"transfers": [*self.data.get("transfers", []), *other.data.get("transfers", [])]})

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line."""
        transfers = self.data.get("transfers", [])
        completed = [each for each in transfers if each["end"] == "completed"]
        moved = sum(each["num_bytes"] for each in completed)
        return {
            "transfers completed": len(completed),
            "transfers not completed": len(transfers) - len(completed),
            "MB moved": round(moved / 1e6, 1),
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data.get("transfers")


def stats_of(reports: list[TransferReport]) -> KVBerthStats | None:
    """The step's reports as plain data; None if there are none."""
    if not reports:
        return None
    transfers = [
        {
            "role": str(report.record.role),
            "mode": str(report.record.mode or "none"),
            "end": str(report.record.end),
            "reason": str(report.record.reason),
            "num_bytes": report.record.num_bytes,
            "num_descriptors": report.record.num_descriptors,
            "seconds": report.record.seconds,
            "post_seconds": report.post_seconds,
        }
        for report in reports
    ]
    return KVBerthStats({"transfers": transfers})


class KVBerthPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, in the API server's process.

    `kvberth:engine_info` says what the engine is: a router that knows only its URL learns the role and the control
    channel's address from it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        engine_info: dict[str, str],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        gauge, counter, histogram = metric_types[Gauge], metric_types[Counter], metric_types[Histogram]
        info = gauge(
            name="kvberth:engine_info",
            documentation="What this engine is to routers and to other engines; the value is always 1.",
            labelnames=[*labelnames, *engine_info],
            multiprocess_mode="mostrecent",
        )
        for values in per_engine_labelvalues.values():
            info.labels(*values, *engine_info.values()).set(1)
        kind = [*labelnames, "role", "mode"]
        self._transfers = counter(
            name="kvberth:transfers",
            documentation="Transfers by how and why they ended.",
            labelnames=[*kind, "end", "reason"],
        )
        self._bytes = counter(
            name="kvberth:transfer_bytes", documentation="Bytes of completed transfers.", labelnames=kind
        )
        self._descriptors = counter(
            name="kvberth:transfer_descriptors", documentation="Descriptors of completed transfers.", labelnames=kind
        )
        self._seconds = histogram(
            name="kvberth:transfer_seconds",
            documentation="From a transfer's first event on this side to its end.",
            labelnames=kind,
            buckets=_SECONDS,
        )
        self._post_seconds = histogram(
            name="kvberth:post_seconds",
            documentation="Planning and posting of one transfer, on the side that moves the bytes.",
            labelnames=kind,
            buckets=_POST_SECONDS,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count one step's transfers."""
        values = self.per_engine_labelvalues[engine_idx]
        for each in transfer_stats_data.get("transfers", ()):
            kind = (*values, each["role"], each["mode"])
            self._transfers.labels(*kind, each["end"], each["reason"]).inc()
            self._seconds.labels(*kind).observe(each["seconds"])
            if each["end"] == "completed":
                self._bytes.labels(*kind).inc(each["num_bytes"])
                self._descriptors.labels(*kind).inc(each["num_descriptors"])
            if each["post_seconds"]:
                self._post_seconds.labels(*kind).observe(each["post_seconds"])
