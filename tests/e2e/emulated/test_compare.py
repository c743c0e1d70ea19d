"""A comparison with real engines, as small as it can be."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import ClusterPool


def test_two_modes_in_one_cell(pool: ClusterPool, tmp_path: Path) -> None:
    """Clusters are started, warmed up and stopped; figures of client, engines and router meet in one summary."""
    pool.close()
    out = tmp_path / "results"
    arguments = "--emulate small --modes push,vllm-pull --rates 8 --prompts 2048 --seconds 1 --repetitions 1"
    command = [sys.executable, "-m", "kvberth", "compare", *arguments.split(), "--output-tokens", "16"]
    done = subprocess.run(
        [*command, "--format", "json", "--out", str(out)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_bytes())
    assert (summary["is_complete"], summary["incidents"]) == (True, [])
    push, pull = summary["cells"]
    for cell in (push, pull):
        assert (cell["requests"], cell["failed"], cell["corruptions"], cell["answers_differing"]) == (16, 0, 0, 0)
        assert cell["ttft_ms"]["p50"] > cell["handoff_ms"]["p50"] > 0
        assert cell["breakdown_ms"]["prefill"] > 0
        assert cell["descriptors_per_transfer"] >= 1
    # vLLM's connector posts a descriptor for each block and layer; ours one for each run of blocks.
    assert pull["descriptors_per_transfer"] > 4 * push["descriptors_per_transfer"]
    assert (push["reserved_block_seconds"] or 0) > 0
    assert pull["reserved_block_seconds"] is None
    page = (out / "report.html").read_text()
    assert summary["verdict"]["headline"] in page.replace("&#39;", "'")
