"""What the binding benchmark makes of its runs."""

from benchmarks.binding import UNEVEN, Run, figures, verdicts

from kvberth import bench


def run(binding, tpots, *, ttft=100.0, reserved=10.0, repetition=0):
    """One request for each time per token."""
    records = [
        bench.RequestRecord(
            index=number,
            request_id=f"r-{number}",
            planned_s=0.0,
            sent_s=0.0,
            late_ms=0.0,
            prompt_tokens=10,
            output_tokens=11,
            ttft_ms=ttft,
            tpot_ms=tpot,
            e2e_ms=ttft + 10 * tpot,
        )
        for number, tpot in enumerate(tpots)
    ]
    return Run(UNEVEN, binding, repetition, reserved, records)


def test_figures_are_of_all_requests_of_all_repetitions():
    """A percentile of twenty is one of them; of each repetition's it would be another one."""
    runs = [run("jit", [float(number) for number in range(first, 101, 2)], reserved=first) for first in (0, 1)]
    found = figures(runs)[UNEVEN, "jit"]
    assert found["requests"] == 101
    assert found["tpot_ms_p50"] == 50.0
    assert found["tpot_ms_p95"] == 95.0
    assert found["reserved_block_seconds"] == 0.5


def test_ratios_are_to_early_and_autos_to_the_better_one():
    """By cell; what was not measured has no verdict."""
    runs = [
        run("early", [20.0]),
        run("jit", [10.0], ttft=105.0, reserved=3.0),
        run("late", [8.0]),
        run("auto", [11.0]),
    ]
    told = {what: round(value, 2) for what, value, _ in verdicts(figures(runs))}
    assert told == {
        "T13 TPOT p95, jit / early": 0.5,
        "T13 TPOT p95, late / early": 0.4,
        "T13 TTFT p50, jit / early": 1.05,
        "T14 reserved block-seconds, jit / early": 0.3,
        f"{UNEVEN}: ttft_ms_p50, auto / early": 1.0,
        f"{UNEVEN}: tpot_ms_p95, auto / jit": 1.1,
    }
    assert verdicts(figures(runs[:2])) == []
