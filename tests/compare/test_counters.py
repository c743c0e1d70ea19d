"""What engines count, from their pages of metrics."""

from kvberth.compare.counters import difference, sums_of

PAGE = """\
# HELP kvberth:transfers_total Transfers.
# TYPE kvberth:transfers_total counter
kvberth:transfers_total{engine="0",role="consumer",mode="push",end="completed",reason="none"} 7.0
kvberth:transfers_total{engine="0",role="consumer",mode="push",end="failed",reason="peer_dead"} 2.0
kvberth:transfers_total{engine="0",role="producer",mode="push",end="completed",reason="none"} 7.0
kvberth:transfer_descriptors_sum{engine="0",role="consumer",mode="push"} 70.0
kvberth:transfer_descriptors_sum{engine="0",role="producer",mode="push"} 70.0
kvberth:transfer_descriptors_count{engine="0",role="consumer",mode="push"} 7.0
kvberth:transfer_descriptors_bucket{engine="0",role="consumer",mode="push",le="1"} 7.0
kvberth:post_seconds_sum{engine="0",role="producer",mode="push"} 0.5
kvberth:emulator_corruptions_total{rank="0"} 1.0
kvberth:emulator_corruptions_total{rank="1"} 2.0
vllm:nixl_num_descriptors_sum{engine="0"} 640.0
vllm:num_requests_running{engine="0"} 3.0
"""


def test_a_transfer_counts_once():
    """Both sides count it; the consumer's count is taken, and the mover's for what posting costs."""
    assert sums_of(PAGE) == {
        "kvberth:transfers_total": 9.0,
        "kvberth:transfers_not_completed": 2.0,
        "kvberth:transfer_descriptors_sum": 70.0,
        "kvberth:transfer_descriptors_count": 7.0,
        "kvberth:post_seconds_sum": 0.5,
        "kvberth:emulator_corruptions_total": 3.0,
        "vllm:nixl_num_descriptors_sum": 640.0,
    }


def test_only_what_was_counted_meanwhile():
    """Series that were not there before count from 0."""
    assert difference({"a": 5.0, "b": 2.0}, {"a": 3.0}) == {"a": 2.0, "b": 2.0}
