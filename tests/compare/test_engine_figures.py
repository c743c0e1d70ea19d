"""Engines' counters in one form for kvberth's connector and vLLM's."""

import pytest
from tests.compare.conftest import measured

from kvberth.compare.engine_figures import engine_figures

ENGINES = {
    "prefill/vllm:request_queue_time_seconds_sum": 0.04,
    "prefill/vllm:request_queue_time_seconds_count": 4.0,
    "prefill/vllm:request_prefill_time_seconds_sum": 0.4,
    "prefill/vllm:request_prefill_time_seconds_count": 4.0,
    "decode/vllm:request_prefill_time_seconds_sum": 0.024,
    "decode/vllm:request_prefill_time_seconds_count": 4.0,
    "decode/kvberth:emulator_corruptions_total": 1.0,
}
OURS = ENGINES | {
    "decode/kvberth:transfer_descriptors_sum": 40.0,
    "decode/kvberth:transfer_descriptors_count": 4.0,
    "decode/kvberth:transfer_bytes_total": 4000.0,
    "decode/kvberth:after_prefill_seconds_sum": 0.02,
    "decode/kvberth:after_prefill_seconds_count": 4.0,
    "decode/kvberth:reserved_block_seconds_total": 12.0,
    "decode/kvberth:transfers_not_completed": 1.0,
    "prefill/kvberth:post_seconds_sum": 0.008,
    "prefill/kvberth:post_seconds_count": 4.0,
}
VLLMS = ENGINES | {
    "decode/vllm:nixl_num_descriptors_sum": 400.0,
    "decode/vllm:nixl_num_descriptors_count": 4.0,
    "decode/vllm:nixl_bytes_transferred_sum": 4000.0,
    "decode/vllm:nixl_post_time_seconds_sum": 0.04,
    "decode/vllm:nixl_post_time_seconds_count": 4.0,
    "decode/vllm:nixl_xfer_time_seconds_sum": 0.12,
    "decode/vllm:nixl_xfer_time_seconds_count": 4.0,
    "prefill/vllm:nixl_num_kv_expired_reqs_total": 2.0,
}


def test_kvberth_s_connector():
    """Means per transfer, sums over repetitions."""
    figures = engine_figures([measured(counters=OURS), measured(counters=OURS, repetition=1)])
    assert (figures.descriptors_per_transfer, figures.bytes_per_transfer) == (10.0, 1000.0)
    assert (figures.post_ms, figures.after_prefill_ms) == pytest.approx((2.0, 5.0))
    assert (figures.corruptions, figures.transfers_failed, figures.reserved_block_seconds) == (2, 2, 24.0)
    breakdown = figures.breakdown(150.0)
    assert (breakdown.queue, breakdown.prefill, breakdown.transfer, breakdown.first_step, breakdown.rest) == (
        pytest.approx((10.0, 100.0, 5.0, 6.0, 29.0))
    )


def test_vllm_s_connectors():
    """By NIXL's clock; what they do not count is not known, and not 0."""
    figures = engine_figures([measured(mode="vllm-pull", counters=VLLMS)])
    assert (figures.descriptors_per_transfer, figures.post_ms, figures.transfer_ms) == pytest.approx(
        (100.0, 10.0, 30.0)
    )
    assert (figures.reserved_block_seconds, figures.after_prefill_ms, figures.transfers_failed) == (None, None, 2)
    assert figures.breakdown(200.0).transfer == pytest.approx(40.0)


def test_undivided_engines_have_no_transfer():
    """They read prompts and write answers under one name."""
    counters = {name.replace("prefill/", "decode/"): value for name, value in ENGINES.items() if "decode/v" not in name}
    figures = engine_figures([measured(mode="colocated", counters=counters)])
    breakdown = figures.breakdown(150.0)
    assert (breakdown.prefill, breakdown.transfer, breakdown.first_step) == pytest.approx((100.0, 0.0, 0.0))
    assert figures.transfers_failed is None


def test_of_attached_deployments_nothing_is_known():
    """No counters, no figures."""
    figures = engine_figures([measured(mode="mine")])
    assert figures.corruptions is None
    assert figures.breakdown(100.0) is None


def test_a_streamed_push_is_under_way_during_the_prefill():
    """So the time in which it may disturb others is longer."""
    figures = engine_figures([measured(counters=OURS)])
    assert figures.busy_ms(is_streamed=False) == pytest.approx(5.0)
    assert figures.busy_ms(is_streamed=True) == pytest.approx(105.0)


def test_what_the_prefix_caches_had():
    """Of the engine that reads prompts: the decode worker is asked too, and has what was handed over."""
    counters = OURS | {
        "prefill/vllm:prefix_cache_queries_total": 400.0,
        "prefill/vllm:prefix_cache_hits_total": 100.0,
        "decode/vllm:prefix_cache_queries_total": 400.0,
        "decode/vllm:prefix_cache_hits_total": 300.0,
    }
    assert engine_figures([measured(counters=counters)]).cached_share == 0.25
    assert engine_figures([measured(counters=OURS)]).cached_share is None
