"""The vLLM KV connector: `KVBerthConnector`.

vLLM finds it by `"kv_connector_module_path": "kvberth.vllm_plugin"`, or by its name alone, which the entry point
`vllm.general_plugins` registers. Nothing of vLLM is imported before the connector is asked for, so that the entry point
costs nothing in processes that do not use it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvberth.vllm_plugin.connector import KVBerthConnector

__all__ = ["KVBerthConnector", "register"]


def register() -> None:
    """Entry point: make the connector known by name. Called by vLLM in every process, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if "KVBerthConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVBerthConnector", "kvberth.vllm_plugin.connector", "KVBerthConnector")


def __getattr__(name: str) -> Any:
    if name == "KVBerthConnector":
        from kvberth.vllm_plugin.connector import KVBerthConnector  # noqa: PLC0415

        return KVBerthConnector
    raise AttributeError(f"module {__name__} has no attribute {name}")
