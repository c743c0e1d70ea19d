"""What the engines of a cluster count: read from their `/metrics` before and after a cell, and subtracted."""

import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping

from kvberth.launch import EngineProcess
from kvberth.router.load import samples_of

__all__ = ["WANTED", "Counters", "difference", "read_counters", "sums_of"]

Counters = Mapping[str, float]
"""Sums over all series of a sample, as `KIND/NAME`: `decode/vllm:request_queue_time_seconds_sum`."""

WANTED = frozenset(
    f"{name}{suffix}"
    for name, suffixes in {
        "kvberth:emulator_corruptions": ("_total",),
        "kvberth:emulator_late_seconds": ("_total",),
        "kvberth:emulator_busy_seconds": ("_total",),
        "kvberth:transfer_descriptors": ("_sum", "_count"),
        "kvberth:post_seconds": ("_sum", "_count"),
        "kvberth:after_prefill_seconds": ("_sum", "_count"),
        "kvberth:transfer_bytes": ("_total",),
        "kvberth:reserved_block_seconds": ("_total",),
        "kvberth:transfers": ("_total",),
        "vllm:nixl_num_descriptors": ("_sum", "_count"),
        "vllm:nixl_post_time_seconds": ("_sum", "_count"),
        "vllm:nixl_xfer_time_seconds": ("_sum", "_count"),
        "vllm:nixl_bytes_transferred": ("_sum", "_count"),
        "vllm:nixl_num_failed_transfers": ("_total",),
        "vllm:nixl_num_kv_expired_reqs": ("_total",),
        "vllm:request_queue_time_seconds": ("_sum", "_count"),
        "vllm:request_prefill_time_seconds": ("_sum", "_count"),
        "vllm:num_preemptions": ("_total",),
        "vllm:prefix_cache_queries": ("_total",),
        "vllm:prefix_cache_hits": ("_total",),
    }.items()
    for suffix in suffixes
)
_NOT_COMPLETED = "kvberth:transfers_not_completed"


def read_counters(engines: Iterable[EngineProcess]) -> dict[str, float]:
    """The wanted samples of all engines, summed by kind of engine. Raises `OSError` if one does not answer."""
    sums: dict[str, float] = defaultdict(float)
    for engine in engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:  # noqa: S310 - our own URL
            text = answer.read().decode()
        for name, value in sums_of(text).items():
            sums[f"{engine.kind}/{name}"] += value
    return dict(sums)


def sums_of(text: str) -> dict[str, float]:
    """The wanted samples of one page, summed over their labels.

    Both sides of kvberth's transfers count them: only the consumer's are taken, but for what posting costs, which only
    the side that moves the bytes counts. Transfers that did not complete become `kvberth:transfers_not_completed`.
    """
    sums: dict[str, float] = defaultdict(float)
    for sample in samples_of(text, WANTED):
        is_ours = sample.name.startswith("kvberth:") and "role" in sample.labels
        if is_ours and sample.labels["role"] != "consumer" and not sample.name.startswith("kvberth:post_seconds"):
            continue
        sums[sample.name] += sample.value
        if sample.name == "kvberth:transfers_total" and sample.labels["end"] != "completed":
            sums[_NOT_COMPLETED] += sample.value
    return dict(sums)


def difference(after: Counters, before: Counters) -> dict[str, float]:
    """What was counted meanwhile."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
