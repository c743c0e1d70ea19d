"""What a local cluster is made of. Checked once; starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvberth.protocol import TransferMode

__all__ = ["ClusterSettings", "Connector"]


class Connector(StrEnum):
    """Which KV connector the engines get."""

    KVBERTH = "kvberth"
    VLLM = "vllm"
    """vLLM's own over NIXL: NixlPushConnector in push, NixlConnector in pull. For comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """One local cluster.

    Attributes:
        model: a name or a folder, as for vLLM; with `emulate`, a profile.
        prefill, decode: how many workers of each kind.
        undivided: engines without a connector beside them, which the router does not know; for comparisons.
        mode: push or pull, for requests that do not say.
        connector: of the prefill and decode workers; vLLM's own are for emulated engines.
        connector_config: further settings of the connector, as in vLLM's `kv_connector_extra_config`.
        authenticate: engines and router get keys of their own, made for this cluster, with our connector.
        name_engines: each engine's id in vLLM is the name of its key, for routers that do not pass keys on.
        emulate: engines are emulated, and `model` is a profile's name or its .toml file.
        emulate_link: their transfers take as long as the true bytes would on the profile's link.
        host: where engines and router listen.
        port: of the router; None finds a free one.
        served_model_name: what clients call the model; None is the model's own name.
        dtype, max_model_len, block_size, prefix_caching: as for vLLM; None leaves vLLM's default.
        engine_args: further arguments for every engine.
        prefill_args, decode_args: further ones for one kind; where both name an argument, these count.
        router_args: further arguments for the router, as for `kvberth router`.
        run_dir: where logs go; None makes a folder under the system's temporary one.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    model: str
    prefill: int = 1
    decode: int = 1
    undivided: int = 0
    mode: str = "push"
    connector: Connector = Connector.KVBERTH
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    authenticate: bool = True
    name_engines: bool = False
    emulate: bool = False
    emulate_link: bool = False
    host: str = "127.0.0.1"
    port: int | None = None
    served_model_name: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    engine_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    run_dir: Path | None = None

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        if self.served_model_name is not None:
            return self.served_model_name
        return Path(self.model).name.removesuffix(".toml") if self.emulate else self.model

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: must be a name or a folder")
        for name, least in (("prefill", 0), ("decode", 0), ("undivided", 0), ("max_model_len", 1), ("block_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: must be {least} or more, not {value}")
        if self.prefill and not self.decode:
            raise ValueError(f"decode: must be 1 or more beside {self.prefill} prefill workers, not 0")
        if not (self.decode or self.undivided):
            raise ValueError("decode: must be 1 or more, not 0")
        if self.mode not in set(TransferMode):
            raise ValueError(f"mode: must be push or pull, not {self.mode}")
        if self.connector is Connector.VLLM and not self.emulate:
            raise ValueError("connector: vllm is for emulated engines; the router cannot find real ones that have it")
        if self.emulate_link and not self.emulate:
            raise ValueError("emulate_link: there is no link to emulate without emulated engines")
        if self.emulate_link and any(each.startswith("--additional-config") for each in self.engine_args):
            raise ValueError("emulate_link: say link = true in your own --additional-config instead")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"port: must be 1 to 65535, not {self.port}")
