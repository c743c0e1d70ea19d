"""What the binding benchmark makes of its runs."""

from benchmarks.binding import UNEVEN, medians, verdicts


def run(binding, tpot, *, cell=UNEVEN, ttft=100.0, reserved=10.0):
    return {
        "cell": cell,
        "binding": binding,
        "ttft_ms_p50": ttft,
        "ttft_ms_p95": ttft,
        "tpot_ms_p50": 6.0,
        "tpot_ms_p95": tpot,
        "reserved_block_seconds": reserved,
        "failed": 0,
    }


def test_figures_are_medians_of_repetitions():
    """One bad run does not decide."""
    figures = medians([run("jit", 8.0), run("jit", 99.0), run("jit", 9.0), run("early", 10.0)])
    assert figures[UNEVEN, "jit"]["tpot_ms_p95"] == 9.0
    assert figures[UNEVEN, "early"]["tpot_ms_p95"] == 10.0


def test_ratios_are_to_early_and_autos_to_the_better_one():
    """By cell; what was not measured has no verdict."""
    runs = [run("early", 20.0), run("jit", 10.0, ttft=105.0, reserved=3.0), run("late", 8.0), run("auto", 11.0)]
    told = {what: round(value, 2) for what, value, _ in verdicts(medians(runs))}
    assert told == {
        "T13 TPOT p95, jit / early": 0.5,
        "T13 TPOT p95, late / early": 0.4,
        "T13 TTFT p50, jit / early": 1.05,
        "T14 reserved block-seconds, jit / early": 0.3,
        f"{UNEVEN}: ttft_ms_p50, auto / early": 1.0,
        f"{UNEVEN}: tpot_ms_p95, auto / jit": 1.1,
    }
    assert verdicts(medians(runs[:2])) == []
