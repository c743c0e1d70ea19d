"""The figures can be had from the raw lines without this package."""

import json
from pathlib import Path
from statistics import median

import pytest

from kvberth.compare import load, to_json


def rederive(raw: Path, mode: str, cell: str) -> tuple[float, float]:
    """Ten lines: the medians over repetitions of the p50 of TTFT and of TPOT."""
    medians = []
    for path in sorted(raw.glob(f"r*-grid-{mode}-{cell}.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        answered = [line for line in lines if line["error"] is None and not line["cancelled"]]
        medians.append([median(line[name] for line in answered) for name in ("ttft_ms", "tpot_ms")])
    ttft, tpot = zip(*medians, strict=True)
    return median(ttft), median(tpot)


def test_the_summary_is_what_the_raw_lines_say(folder):
    """Every cell of every mode; and a ratio."""
    summary = json.loads(to_json(load(folder)))
    raw = folder.path / "raw"
    assert len(summary["cells"]) == 4
    for cell in summary["cells"]:
        figures = cell["ttft_ms"]["p50"], cell["tpot_ms"]["p50"]
        assert figures == pytest.approx(rederive(raw, cell["mode"], cell["cell"]))
    (ratio,) = [
        each["value"]
        for each in summary["ratios"]
        if (each["cell"], each["metric"], each["percentile"]) == ("16384@8", "ttft_ms", 50)
    ]
    assert ratio == pytest.approx(
        rederive(raw, "push", "16384@8")[0] / rederive(raw, "vllm-pull", "16384@8")[0], rel=0.01
    )


def test_the_summary_s_schema(folder):
    """What others read is there, under its name; fields are added and never renamed."""
    summary = json.loads(to_json(load(folder)))
    assert summary["schema"] == 1
    assert {"cells", "targets", "environment", "verdict", "ratios", "bends", "missing", "incidents"} <= summary.keys()
    names = {"mode", "rate", "prompt_tokens", "requests", "failed", "corruptions", "ttft_ms", "tpot_ms", "handoff_ms"}
    assert names | {"descriptors_per_transfer", "post_ms", "breakdown_ms", "stall"} <= summary["cells"][0].keys()
    assert {"p50", "p95", "p99", "p50_interval"} <= summary["cells"][0]["ttft_ms"].keys()
    assert {"id", "value", "target", "met"} <= summary["targets"][0].keys()
    assert {"machine", "versions", "settings", "started"} <= summary["environment"].keys()
    assert summary["environment"]["settings"]["seed"] == 0
