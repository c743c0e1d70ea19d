"""The project's targets, met, missed or not measured."""

import msgspec
import pytest
from tests.compare.conftest import cell, manifest, measured, record, settings

from kvberth.compare.comparison import compute

ALL = ("push", "pull", "vllm-pull", "vllm-push", "vllm-pull-inline", "vllm-push-inline")


def targets(*cells, **changes):
    return compute(
        manifest(settings(**({"modes": ALL, "rates": (1.0, 4.0, 8.0), "prompts": (1024, 16384)} | changes))),
        cells,
        [],
        {},
    ).targets


def at(rate, ttft=100.0, tpot=10.0, prompt_tokens=16384, **changes):
    records = [record(index, ttft, tpot) for index in range(4)]
    return measured(records=records, of=cell(rate=rate, prompt_tokens=prompt_tokens), **changes)


def find(found, id_, text=""):
    return [target for target in found if target.id == id_ and text in target.name]


def test_all_are_there_and_none_is_measured():
    """A comparison of nothing says so of each."""
    found = targets()
    assert [each.id for each in found] == ["T1", "T1", "T2", "T2", "T3", "T4", "T5", "T6", "T10", "T11", "T11"]
    assert all(each.value is None and each.met is None and each.note == "not measured" for each in found)


@pytest.mark.parametrize(("ttft", "met"), [(57.0, True), (59.0, False)])
def test_t1_is_met_up_to_its_limit(ttft, met):
    """0.58 of vLLM's pull; both ways of posting are shown."""
    cells = [
        at(4.0, ttft),
        at(4.0, 100.0, mode="vllm-pull"),
        at(4.0, 50.0, mode="vllm-pull-inline"),
    ]
    default, inline = find(targets(*cells), "T1", "vLLM pull")
    assert (default.value, default.target, default.met) == (pytest.approx(ttft / 100), 0.58, met)
    assert "inline" in inline.name
    assert inline.met is False


def test_t3_is_about_inline_posting():
    """That line comes first; the default's is beside it."""
    cells = [at(8.0, tpot=5.0), at(8.0, tpot=10.0, mode="vllm-pull-inline"), at(8.0, tpot=6.0, mode="vllm-pull")]
    inline, default = find(targets(*cells), "T3")
    assert (inline.value, inline.met, default.met) == (0.5, True, False)


def test_t4_compares_with_the_decode_load_alone():
    """Which is measured in a group of its own."""
    alone = measured(
        records=[record(index, 20.0, 9.9) for index in range(4)],
        mode="decode-only",
        of=cell(group="decode-only", shared_tokens=16368),
    )
    chosen = settings(modes=ALL, rates=(8.0,), prompts=(16384,), extra=True)
    (found,) = find(compute(manifest(chosen), [at(8.0, tpot=10.0), alone], [], {}).targets, "T4")
    assert found.value == pytest.approx(10.0 / 9.9)
    assert found.interval == pytest.approx((10.0 / 9.9, 10.0 / 9.9))
    assert found.met is True


def test_t5_is_the_handoff_that_the_router_saw():
    """In milliseconds, with its interval."""
    handoffs = {f"r{index}": 12.0 for index in range(4)}
    (found,) = find(targets(at(1.0, handoffs_ms=handoffs)), "T5")
    assert (found.value, found.interval, found.met) == (12.0, (12.0, 12.0), True)


def test_t6_counts_in_steps():
    """A gap of three steps beside a transfer is two steps beyond one."""
    records = [
        record(0, 50.0, itl_ms=[10.0, 10.0, 30.0, 10.0]),
        record(1, 95.0, sent_s=0.0, itl_ms=[10.0, 10.0]),
    ]
    (found,) = find(targets(measured(records=records)), "T6")
    assert (found.value, found.met) == (pytest.approx(2.0), False)


def test_t6_leaves_out_what_happens_without_transfers():
    """Requests that come hold up others' tokens on a worker that gets no KV, too: 20 ms of those 30 here."""
    alone = measured(
        records=[
            record(0, 50.0, itl_ms=[10.0, 20.0, 10.0, 10.0]),
            record(1, 35.0, sent_s=0.05, itl_ms=[10.0, 10.0]),
        ],
        mode="decode-only",
        of=cell(group="decode-only", shared_tokens=16368),
    )
    records = [record(0, 50.0, itl_ms=[10.0, 10.0, 30.0, 10.0]), record(1, 95.0, sent_s=0.0, itl_ms=[10.0, 10.0])]
    chosen = settings(modes=ALL, rates=(8.0,), prompts=(16384,), extra=True)
    (found,) = find(compute(manifest(chosen), [measured(records=records), alone], [], {}).targets, "T6")
    assert (found.value, found.met) == (pytest.approx(1.0), True)
    assert "less those of the load without transfers beside a request that comes (20.0 ms)" in found.note


def test_what_is_missed_has_a_reason():
    """What the figures say of where the time went; what is met needs none."""
    counted = {
        f"{kind}/vllm:request_{what}_time_seconds_{part}": value
        for kind in ("prefill", "decode")
        for what, seconds in (("queue", 0.04), ("prefill", 0.12))
        for part, value in (("sum", seconds), ("count", 4.0))
    } | {"decode/kvberth:transfer_descriptors_count": 4.0}
    cells = [at(4.0, 90.0, counters=counted), at(4.0, 100.0, mode="vllm-pull"), at(4.0, 300.0, mode="vllm-push")]
    found = targets(*cells)
    (missed,), (met,) = find(found, "T1", "vLLM pull"), find(found, "T1", "vLLM push")
    assert missed.reason.startswith("kvberth push, means in ms: queue 10, prefill 30, transfer behind it 0")
    assert (met.met, met.reason) == (True, "")


@pytest.mark.parametrize("ttft", [50.0, 90.0])
def test_a_busy_machine_makes_a_target_doubtful(ttft):
    """Met or missed: the figures of such a cell show the machine as well."""
    busy = msgspec.structs.replace(at(4.0, ttft), idle_share=0.05)
    (found,) = find(targets(busy, at(4.0, 100.0, mode="vllm-pull")), "T1", "vLLM pull")
    assert found.note == "doubtful, since only 5% of the machine was idle with kvberth push"
    assert bool(found.reason) is not found.met


def test_a_p95_of_too_few_requests_is_no_target():
    """It says that, and not that nobody has measured."""
    of = cell(group="chunks-4096")
    cells = [measured(of=of), measured(mode="vllm-pull", of=of)]
    found = compute(manifest(settings(modes=ALL, rates=(8.0,), extra=True)), cells, [], {}).targets
    pull, push = find(found, "T2")
    assert (pull.value, pull.note, push.note) == (None, "too few requests for a p95", "not measured")


def test_t10_must_not_be_worse():
    """At light load, 1k prompts."""
    cells = [at(1.0, 95.0, prompt_tokens=1024), at(1.0, 100.0, prompt_tokens=1024, mode="vllm-pull")]
    (found,) = find(targets(*cells), "T10")
    assert (found.value, found.met) == (pytest.approx(0.95), True)


def test_t11_is_about_pull():
    """Both of its figures."""
    cells = [at(8.0, 90.0, 5.0, mode="pull"), at(8.0, 100.0, 10.0, mode="vllm-pull-inline")]
    ttft, tpot = find(targets(*cells), "T11")
    assert (ttft.value, tpot.value, ttft.met, tpot.met) == (pytest.approx(0.9), pytest.approx(0.5), True, True)


def test_a_baseline_that_lost_its_transfers_is_no_baseline():
    """To be faster than a handoff that failed and was computed again is nothing."""
    lost = {
        "decode/vllm:nixl_num_descriptors_count": 3.0,
        "decode/vllm:nixl_num_descriptors_sum": 300.0,
        "decode/vllm:nixl_num_failed_transfers_total": 1.0,
    }
    cells = [at(4.0, 50.0), at(4.0, 3000.0, mode="vllm-pull", counters=lost)]
    (found,) = find(targets(*cells), "T1", "vLLM pull")
    assert (found.value, found.met, found.note) == (None, None, "not measured")
    verdict = compute(manifest(settings(rates=(4.0,))), cells, [], {}).verdict
    assert verdict.doubts[0].startswith("vLLM pull: 1 requests were answered without their transfer")
    assert verdict.headline == "Only kvberth push was measured; there is nothing to compare it with."
