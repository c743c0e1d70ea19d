"""What the connector tells vLLM's `/metrics`."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvberth.mover import TransferReport
from kvberth.protocol import End, EndRecord, Reason, TransferKey, TransferMode
from kvberth.protocol.ids import Role
from kvberth.vllm_plugin.metrics import (
    HEARTBEATS_MISSED,
    LEASED_BLOCKS,
    MOVER_QUEUE,
    KVBerthPromMetrics,
    KVBerthStats,
    stats_of,
)


def report(role: Role = Role.CONSUMER, *, end: End = End.COMPLETED, num_runs: int = 0) -> TransferReport:
    """Of a push of 300 bytes in 3 descriptors."""
    is_ok = end is End.COMPLETED
    reason = Reason.NONE if is_ok else Reason.PEER_LOST
    costs = (12.0, 0.02) if is_ok else (0.0, None)
    record = EndRecord(role, TransferKey("t"), TransferMode.PUSH, end, reason, "", 300, 3, 1.5, *costs)
    return TransferReport(record, 0.001 if num_runs else 0.0, num_runs)


class Page:
    """The metrics of one engine, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def of(kind):
            return lambda *args, multiprocess_mode=None, **named: kind(*args, registry=self._registry, **named)

        self.metrics = KVBerthPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            {Gauge: of(Gauge), Counter: of(Counter), Histogram: of(Histogram)},
            ["engine"],
            {0: ["0"]},
            {"role": "kv_consumer"},
        )

    def observe(self, stats: KVBerthStats | None) -> None:
        assert stats is not None
        self.metrics.observe(stats.data)

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"kvberth:{name}", {"engine": "0", **labels})


@pytest.fixture
def page() -> Page:
    return Page()


KIND = {"role": "consumer", "mode": "push"}


def test_completed_transfer_is_counted(page):
    """Ends by reason, bytes, descriptors, time, what came after the prefill, and what it kept reserved."""
    page.observe(stats_of([report()]))
    assert page.value("transfers_total", **KIND, end="completed", reason="none") == 1
    assert page.value("transfer_bytes_total", **KIND) == 300
    assert page.value("transfer_descriptors_sum", **KIND) == 3
    assert page.value("transfer_seconds_sum", **KIND) == 1.5
    assert page.value("after_prefill_seconds_sum", **KIND) == 0.02
    assert page.value("reserved_block_seconds_total", **KIND) == 12


def test_failed_transfer_moves_no_bytes(page):
    """It is counted by its reason only."""
    page.observe(stats_of([report(end=End.FAILED)]))
    assert page.value("transfers_total", **KIND, end="failed", reason="peer_lost") == 1
    assert page.value("transfer_bytes_total", **KIND) is None
    assert page.value("after_prefill_seconds_count", **KIND) is None


def test_runs_and_posting_are_told_by_the_side_that_moves(page):
    """P in a push."""
    page.observe(stats_of([report(), report(Role.PRODUCER, num_runs=2)]))
    assert page.value("transfer_runs_sum", role="producer", mode="push") == 2
    assert page.value("post_seconds_count", role="producer", mode="push") == 1
    assert page.value("transfer_runs_count", **KIND) is None


def test_gauges_stand_at_zero_before_there_is_news(page):
    """So that a dashboard shows a line and not a hole."""
    assert page.value(LEASED_BLOCKS) == page.value(MOVER_QUEUE) == page.value("heartbeats_missed_total") == 0


def test_counts_add_up_and_gauges_replace(page):
    """Two steps, and two ranks in one of them."""
    page.observe(stats_of([], counts={HEARTBEATS_MISSED: 2}, now={LEASED_BLOCKS: 7}))
    joined = stats_of([], counts={HEARTBEATS_MISSED: 1}).aggregate(stats_of([], counts={HEARTBEATS_MISSED: 1}))
    page.observe(joined.aggregate(stats_of([], now={LEASED_BLOCKS: 0})))
    assert page.value("heartbeats_missed_total") == 4
    assert page.value(LEASED_BLOCKS) == 0


def test_nothing_new_is_told_as_nothing():
    """A quiet step costs nothing."""
    assert stats_of([]) is None
    stats = stats_of([report()])
    stats.reset()
    assert stats.is_empty()
