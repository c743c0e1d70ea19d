"""The connector's figures in vLLM's own `/metrics`."""

from collections import Counter as Counts
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvberth.mover import TransferReport

__all__ = ["HEARTBEATS_MISSED", "LEASED_BLOCKS", "MOVER_QUEUE", "KVBerthPromMetrics", "KVBerthStats", "stats_of"]

HEARTBEATS_MISSED = "heartbeats_missed"
LEASED_BLOCKS = "leased_blocks"
MOVER_QUEUE = "mover_queue"

_GAUGES = {
    LEASED_BLOCKS: "Blocks of finished prefills that are kept for decode workers.",
    MOVER_QUEUE: "Commands and batches of descriptors that wait for the mover.",
}

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_POST_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_PIECES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


@dataclass
class KVBerthStats(KVConnectorStats):
    """What one step brought, in plain data.

    `data` has `transfers`, those that ended, as a list of dictionaries; `counts`, what is to be added up; and `now`,
    what replaces the figure of before.
    """

    def reset(self) -> None:
        """Forget what was collected."""
        self.data: dict[str, Any] = {"transfers": [], "counts": {}, "now": {}}

    def aggregate(self, other: KVConnectorStats) -> "KVBerthStats":
        """Join with the next step's, or with another rank's."""
        counts = Counts(self.data.get("counts", {}))
        counts.update(other.data.get("counts", {}))
        return KVBerthStats(
            {
                "transfers": [*self.data.get("transfers", []), *other.data.get("transfers", [])],
                "counts": dict(counts),
                "now": {**self.data.get("now", {}), **other.data.get("now", {})},
            }
        )

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
        return not any(self.data.values())


def stats_of(
    reports: list[TransferReport], *, counts: dict[str, int] | None = None, now: dict[str, int] | None = None
) -> KVBerthStats | None:
    """A step's news as plain data; None if there are none.

    Args:
        reports: transfers that have ended.
        counts: what is to be added to a counter, by name.
        now: what a gauge shows from now on, by name.
    """
    transfers = [
        {
            "role": str(report.record.role),
            "mode": str(report.record.mode or "none"),
            "end": str(report.record.end),
            "reason": str(report.record.reason),
            "num_bytes": report.record.num_bytes,
            "num_descriptors": report.record.num_descriptors,
            "seconds": report.record.seconds,
            "after_prefill_seconds": report.record.after_prefill_seconds,
            "reserved_block_seconds": report.record.reserved_block_seconds,
            "post_seconds": report.post_seconds,
            "num_runs": report.num_runs,
        }
        for report in reports
    ]
    stats = KVBerthStats({"transfers": transfers, "counts": counts or {}, "now": now or {}})
    return None if stats.is_empty() else stats


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
        self._descriptors = histogram(
            name="kvberth:transfer_descriptors",
            documentation="Descriptors of one completed transfer.",
            labelnames=kind,
            buckets=_PIECES,
        )
        self._runs = histogram(
            name="kvberth:transfer_runs",
            documentation="Runs of neighbouring blocks in one transfer, on the side that moves the bytes.",
            labelnames=kind,
            buckets=_PIECES,
        )
        self._seconds = histogram(
            name="kvberth:transfer_seconds",
            documentation="From a transfer's first event on this side to its end.",
            labelnames=kind,
            buckets=_SECONDS,
        )
        self._after_prefill = histogram(
            name="kvberth:after_prefill_seconds",
            documentation="From the end of the prefill to the completion of the transfer.",
            labelnames=kind,
            buckets=_SECONDS,
        )
        self._post_seconds = histogram(
            name="kvberth:post_seconds",
            documentation="Planning and posting of one transfer, on the side that moves the bytes.",
            labelnames=kind,
            buckets=_POST_SECONDS,
        )
        self._reserved = counter(
            name="kvberth:reserved_block_seconds",
            documentation="Blocks that waited for their KV on a decode worker, times how long.",
            labelnames=kind,
        )
        self._counters = {
            HEARTBEATS_MISSED: counter(
                name="kvberth:heartbeats_missed",
                documentation="Heartbeats to prefill workers without an answer when the next one was due.",
                labelnames=labelnames,
            )
        }
        self._gauges = {
            name: gauge(
                name=f"kvberth:{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in _GAUGES.items()
        }
        for values in per_engine_labelvalues.values():
            for each in (*self._counters.values(), *self._gauges.values()):
                each.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one step's news."""
        values = self.per_engine_labelvalues[engine_idx]
        for each in transfer_stats_data.get("transfers", ()):
            self._observe_transfer(each, (*values, each["role"], each["mode"]))
        for name, count in transfer_stats_data.get("counts", {}).items():
            self._counters[name].labels(*values).inc(count)
        for name, figure in transfer_stats_data.get("now", {}).items():
            self._gauges[name].labels(*values).set(figure)

    def _observe_transfer(self, each: dict[str, Any], kind: tuple[object, ...]) -> None:
        self._transfers.labels(*kind, each["end"], each["reason"]).inc()
        self._seconds.labels(*kind).observe(each["seconds"])
        self._reserved.labels(*kind).inc(each["reserved_block_seconds"])
        if each["end"] == "completed":
            self._bytes.labels(*kind).inc(each["num_bytes"])
            self._descriptors.labels(*kind).observe(each["num_descriptors"])
        if each["after_prefill_seconds"] is not None:
            self._after_prefill.labels(*kind).observe(each["after_prefill_seconds"])
        if each["num_runs"]:
            self._runs.labels(*kind).observe(each["num_runs"])
            self._post_seconds.labels(*kind).observe(each["post_seconds"])
