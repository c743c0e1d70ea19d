"""The connector as vLLM finds and asks it; its two halves have tests of their own."""

from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvberth.vllm_plugin
from kvberth.vllm_plugin import connector as module
from kvberth.vllm_plugin.connector import KVBerthConnector
from kvberth.vllm_plugin.metrics import KVBerthStats
from kvberth.vllm_plugin.settings import SettingsError


def config(pipeline: int = 1) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline))


def caches(groups: int = 1) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[None] * groups)


def test_found_by_name_alone():
    """The entry point registers it, however often it is called."""
    (entry,) = entry_points(group="vllm.general_plugins", name="kvberth")
    entry.load()()
    entry.load()()
    assert KVConnectorFactory.get_connector_class_by_name("KVBerthConnector") is KVBerthConnector


def test_found_by_module_path():
    """As `kv_connector_module_path` does."""
    assert kvberth.vllm_plugin.KVBerthConnector is KVBerthConnector
    with pytest.raises(AttributeError, match="no attribute Other"):
        _ = kvberth.vllm_plugin.Other


@pytest.mark.parametrize(
    ("version", "vllm_config", "kv_cache_config", "text"),
    [
        ("0.31.2", config(), caches(), r"vLLM is 0.31.2; supported are 0.32 and 0.33"),
        ("0.320.0", config(), caches(), r"vLLM is 0.320.0"),
        ("0.32.0", config(), caches(2), "2 groups of KV caches"),
        ("0.32.0", config(2), caches(), "set pipeline_parallel_size to 1"),
    ],
)
def test_what_is_not_supported_is_refused_at_start(monkeypatch, version, vllm_config, kv_cache_config, text):
    """With what would be right."""
    monkeypatch.setattr(module.vllm, "__version__", version)
    with pytest.raises(SettingsError, match=text):
        module._check_supported(vllm_config, kv_cache_config)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1"])
def test_supported_versions_start(monkeypatch, version):
    """Both of them."""
    monkeypatch.setattr(module.vllm, "__version__", version)
    module._check_supported(config(), caches())


def test_stats_of_steps_and_ranks_add_up():
    """What vLLM's log line says."""
    done = {"end": "completed", "num_bytes": 2_000_000}
    failed = {"end": "failed", "num_bytes": 0}
    one, two = KVBerthStats({"transfers": [done]}), KVBerthStats({"transfers": [failed, done]})
    both = one.aggregate(two)
    assert both.reduce() == {"transfers completed": 2, "transfers not completed": 1, "MB moved": 4.0}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
