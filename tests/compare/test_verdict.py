"""The figures in words."""

import pytest
from tests.compare.conftest import cell, fill, manifest, measured, record, settings

from kvberth.compare import Folder, load
from kvberth.compare.comparison import compute
from kvberth.compare.summary import summarise_cell
from kvberth.compare.verdict import bends_of


def compared(*cells, **changes):
    return compute(manifest(settings(**changes)), cells, [], {})


def both(push, pull, **changes):
    """One cell, both modes, two repetitions of the same times."""
    cells = [
        measured(ttfts, mode=mode, repetition=repetition, **changes)
        for mode, ttfts in (("push", push), ("vllm-pull", pull))
        for repetition in range(2)
    ]
    return compared(*cells, rates=(8.0,))


def test_light_and_heavy_load_are_told_apart(folder):
    """At 1/s nothing differs, and nobody wins; at 8/s push does, by what and over whom."""
    verdict = load(folder).verdict
    assert verdict.headline == (
        "This traffic wants kvberth push: at 16k prompts at 8 requests/s no mode gives a first token sooner, or the "
        "tokens behind it faster."
    )
    light, heavy, *_ = verdict.points
    assert light == (
        "At the lightest load (16k prompts, 1/s) first tokens come equally soon in all modes, in about 100 ms. The "
        "tokens behind them come every 10.0 ms in all modes."
    )
    assert heavy == (
        "At the heaviest load (16k prompts, 8/s) first tokens come soonest from kvberth push, in 100 ms (median); "
        "later come vLLM pull 200. The tokens behind them come every 10.0 ms in all modes."
    )


def test_first_tokens_and_those_behind_can_want_different_modes():
    """Neither is put above the other: the reader learns who is better at what."""
    push = [record(index, 100.0, 20.0) for index in range(4)]
    pull = [record(index, 200.0, 10.0) for index in range(4)]
    comparison = compared(measured(records=push), measured(records=pull, mode="vllm-pull"), rates=(8.0,))
    assert comparison.verdict.headline == (
        "It depends on what you want: at 16k prompts at 8 requests/s the first token comes soonest from kvberth push, "
        "the tokens behind it fastest from vLLM pull."
    )
    assert comparison.verdict.points[0].endswith("The tokens behind them come every 10.0 to 20.0 ms (kvberth push).")


def test_no_difference_names_no_winner():
    """Figures that are equal within their intervals are equal."""
    verdict = both([100.0, 120.0, 110.0, 130.0], [101.0, 119.0, 111.0, 129.0]).verdict
    assert verdict.headline == (
        "No difference here: at 16k prompts at 8 requests/s all modes give first tokens equally soon, and those behind "
        "them as fast."
    )


def test_a_difference_that_nobody_would_notice_is_none():
    """2%, however certain."""
    verdict = both([100.0, 100.1, 100.2, 100.3], [102.0, 102.1, 102.2, 102.3]).verdict
    assert verdict.headline.startswith("No difference here")


def test_wrong_kv_is_the_verdict():
    """Nothing is recommended over a mode that gave wrong answers, however fast."""
    counters = {"decode/kvberth:emulator_corruptions_total": 3.0}
    verdict = both([100.0] * 4, [200.0] * 4, counters=counters).verdict
    assert verdict.headline.startswith("Do not use: kvberth push, vLLM pull.")
    assert any("12 KV contexts held wrong words" in point for point in verdict.points)


def test_a_mode_that_fails_does_not_win():
    """Figures of the requests that were not dropped are no figures of the mode."""
    failing = [record(0, 10.0), record(1, 10.0), record(2, error="timeout: x"), record(3, 10.0)]
    cells = [measured(records=failing), measured([100.0] * 4, mode="vllm-pull")]
    verdict = compared(*cells, rates=(8.0,)).verdict
    assert "vLLM pull" in verdict.headline
    assert any("1 of 8 requests failed" in point for point in verdict.points)


def test_cancelled_requests_are_neither_failures_nor_figures():
    """Their times are left out, and their number is said."""
    gone = record(3, 5000.0, cancelled=True, tpot_ms=None, e2e_ms=None, text_sha256=None)
    push = measured(records=[record(0), record(1), record(2), gone])
    comparison = compared(push, measured(mode="vllm-pull"), rates=(8.0,))
    cell_of_push = comparison.cells[0]
    assert (cell_of_push.failed, cell_of_push.cancelled, cell_of_push.e2e_ms.p50) == (0, 1, 120.0)
    assert any("1 were cancelled by their clients, as planned" in point for point in comparison.verdict.points)


def test_answers_that_differ_are_said():
    """Even if nothing else is wrong."""
    odd = [record(index, text_sha256="other") for index in range(4)]
    cells = [measured(records=odd), measured(mode="vllm-pull")]
    assert any("8 answers differ between modes" in point for point in compared(*cells, rates=(8.0,)).verdict.points)


def test_nothing_measured():
    """There is no verdict without figures."""
    assert compared().verdict.headline == "Nothing was measured to its end."


def test_a_busy_machine_is_a_doubt():
    """The reader learns it before the figures."""
    busy = measured()
    cells = [
        type(busy)(**{name: getattr(busy, name) for name in busy.__struct_fields__} | {"idle_share": 0.05}),
        measured(mode="vllm-pull"),
    ]
    verdict = compared(*cells, rates=(8.0,)).verdict
    (doubt,) = verdict.doubts
    assert doubt.startswith("In 1 of 2 cells less than 20%")
    assert verdict.headline.endswith("But the machine was busy, and this may be its doing.")


def curve(ttfts_ms, requests=4):
    """One mode at rising rates; the last tenth of the requests takes 10 ms more."""
    slow = -(-requests // 10)
    return [
        summarise_cell([each], [each])
        for rate, ttft in zip((1.0, 2.0, 4.0), ttfts_ms, strict=True)
        for each in [measured([float(ttft)] * (requests - slow) + [ttft + 10.0] * slow, of=cell(rate=rate))]
    ]


@pytest.mark.parametrize(("ttfts", "bend", "last_good"), [((100, 150, 250), 4.0, 2.0), ((100, 150, 199), None, 4.0)])
def test_where_a_curve_bends(ttfts, bend, last_good):
    """At the first rate whose TTFT is more than twice that of the lowest rate."""
    (found,) = bends_of(curve(ttfts))
    assert (found.rate, found.last_good_rate) == (bend, last_good)


@pytest.mark.parametrize(("requests", "why"), [(4, "p50"), (60, "p95")])
def test_a_bend_is_told_from_the_p95_if_it_is_known(requests, why):
    """Or else from the median: of four requests nobody knows a p95."""
    (found,) = bends_of(curve((100, 150, 250), requests))
    assert found.why.startswith(f"the {why} of TTFT is ")


def test_modes_that_do_not_keep_pace_stand_together():
    """One sentence per prompt length."""
    cells = [
        measured([ttft] * 4, mode=mode, of=cell(rate=rate))
        for mode in ("push", "vllm-pull")
        for rate, ttft in ((1.0, 100.0), (8.0, 300.0))
    ]
    (words,) = [point for point in compared(*cells).verdict.points if "keep pace" in point]
    assert words == (
        "With 16k prompts these do not keep pace: kvberth push from 8/s on (the p50 of TTFT is 3.0 times that at 1/s), "
        "vLLM pull from 8/s on (the p50 of TTFT is 3.0 times that at 1/s)."
    )


def test_failed_requests_bend_a_curve():
    """A mode that drops requests does not keep pace, however fast the rest is."""
    each = measured(records=[record(0), record(1, error="HTTP 500: x")])
    (found,) = bends_of([summarise_cell([each], [each])])
    assert (found.rate, found.last_good_rate, found.why) == (8.0, None, "1 of 2 requests failed")


def test_what_is_missing_is_listed(tmp_path):
    """By mode, cell and repetition, with what of it is on disk."""
    folder = Folder(tmp_path)
    folder.create(manifest(settings()))
    key = "r1-grid-push-16384@8"
    fill(folder, settings(), skip=lambda each: each == key)
    cut = folder.open_cell(key)
    cut.write(record(0))
    cut.abandon()
    comparison = load(folder)
    (missing,) = comparison.missing
    assert (missing.mode, missing.cell, missing.repetition, missing.kept_requests) == ("push", "16384@8", 1, 1)
    assert not comparison.is_complete
    (push,) = [each for each in comparison.cells if (each.mode, each.cell) == ("push", "16384@8")]
    assert (push.repetitions, push.requests) == (1, 4)
