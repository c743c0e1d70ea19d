"""The vLLM platform: what vLLM asks about the device it believes to run on.

`device_type` is `cpu`, so that memory is ordinary and vLLM's NIXL connectors register it as such; what the CPU platform
would do beyond that (kernels, core binding, a worker in a process of its own) is left out.
"""

import argparse
import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from prometheus_client import REGISTRY
from vllm.platforms.interface import Platform, PlatformEnum

from kvberth.emulator.counters import CounterFile, EmulatorCollector
from kvberth.emulator.errors import EmulatorError
from kvberth.emulator.model_files import is_profile, model_folder, profile_of_folder
from kvberth.emulator.profile import HEAD_SLOTS, Profile, profile_names
from kvberth.emulator.settings import EmulatorSettings
from kvberth.emulator.stream import Event, Stream
from kvberth.emulator.versions import check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EmulatedPlatform", "profile_of"]

# The second model runner's messages differ; the emulated worker reads those of the first. vLLM reads this each time.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
# More threads than one spin at barriers, and the engine needs none.
os.environ.setdefault("OMP_NUM_THREADS", "1")

check_version()

_GIB = 1 << 30


class EmulatedPlatform(Platform):
    """See the module."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "KVBERTH_EMULATED_DEVICES"
    stream: ClassVar[Stream[Any] | None] = None
    """Of this process's worker, which sets it."""

    @classmethod
    def pre_register_and_update(cls, parser: argparse.ArgumentParser | None = None) -> None:
        """Let `--model` (and `vllm serve NAME`) name a profile."""
        for action in parser._actions if parser is not None else ():
            if action.dest in {"model", "model_tag"}:
                action.type = _model_argument

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Choose worker and executor, and refuse what cannot be emulated.

        Raises:
            EmulatorError: a part of the configuration that is not emulated, by name.
        """
        if vllm_config.model_config is None:
            return  # vLLM's default configuration, made in passing
        profile = profile_of(vllm_config)
        _refuse_unsupported(vllm_config)
        vllm_config.parallel_config.worker_cls = "kvberth.emulator.worker.EmulatedWorker"
        if vllm_config.parallel_config.world_size == 1:
            vllm_config.parallel_config.distributed_executor_backend = "uni"
        vllm_config.parallel_config.disable_custom_all_reduce = True
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = profile.engine.block_size
        cls._compile_nothing(vllm_config)
        cls._count(vllm_config, profile)

    @classmethod
    def _compile_nothing(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode, CUDAGraphMode  # noqa: PLC0415

        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.compilation_config.cudagraph_capture_sizes = []

    @classmethod
    def _count(cls, vllm_config: "VllmConfig", profile: Profile) -> None:
        """The file for the ranks' figures, once, in the process that makes the configuration."""
        settings = EmulatorSettings.of(vllm_config.additional_config)
        if settings.counters or not isinstance(vllm_config.additional_config, dict):
            return
        counters = CounterFile.create()
        import atexit  # noqa: PLC0415

        atexit.register(counters.remove)
        infos = {"kvberth:emulator_info": {"profile": profile.name, "bytes_scale": f"{profile.bytes_scale:g}"}}
        infos |= _nixl_engine_info(vllm_config)
        REGISTRY.register(EmulatorCollector(counters, vllm_config.parallel_config.world_size, infos))
        settings.counting(counters.path).store(vllm_config.additional_config)

    @classmethod
    def get_attn_backend_cls(cls, *_args: Any, **_kwargs: Any) -> str:
        """The emulated backend, whatever was asked for."""
        return "kvberth.emulator.attention.EmulatedAttentionBackend"

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse what only a real model could answer.

        Raises:
            VLLMValidationError: becomes the client's HTTP 400.
        """
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

        refused = {
            "logprobs": "an emulated engine computes no probabilities",
            "prompt_logprobs": "an emulated engine computes no probabilities",
            "structured_outputs": "the answers of an emulated engine mean nothing",
        }
        for name, reason in refused.items():
            if getattr(params, name, None) is not None:
                raise VLLMValidationError(f"{name} cannot be had: {reason}", parameter=name)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Not a GPU's name: vLLM must not choose kernels by it."""
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """As much as makes vLLM choose the defaults of a large GPU (tokens per step)."""
        return 141 * _GIB

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """None of it is real."""
        return 0.0

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """No binding: vLLM's NIXL connector would tie the threads of all engines to one core."""
        return []

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is but one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Nothing is random."""

    @classmethod
    def inference_mode(cls) -> Any:
        """No gradients."""
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No device to pin for."""
        return False

    @classmethod
    def record_event(cls) -> Event:
        """An event behind all steps that this process's worker has launched."""
        if cls.stream is None:
            raise EmulatorError("there is no emulated worker in this process")
        return cls.stream.record()

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA is refused before this is asked."""
        raise EmulatorError("LoRA is not emulated")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The plain one, on gloo."""
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Nothing is compiled."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """One group of layers."""
        return False

    @classmethod
    def import_ir_kernels(cls) -> None:
        """None are called."""

    @classmethod
    def import_kernels(cls) -> None:
        """None are called."""


def profile_of(vllm_config: "VllmConfig") -> Profile:
    """The profile that the configured model stands for.

    Raises:
        EmulatorError: the model is no profile's folder.
    """
    model = vllm_config.model_config.model
    profile = profile_of_folder(model)
    if profile is None:
        raise EmulatorError(
            f"model {model} has no profile: with KVBERTH_EMULATE=1, --model names one of "
            f"{', '.join(profile_names())}, or a .toml file"
        )
    return profile


def _nixl_engine_info(vllm_config: "VllmConfig") -> dict[str, dict[str, str]]:
    """What an engine with vLLM's own NIXL connectors does not say of itself, as our connector says it.

    With it the router can send such an engine concurrent legs, which is the best that they can have.
    """
    from vllm import envs  # noqa: PLC0415

    transfer = vllm_config.kv_transfer_config
    modes = {"NixlConnector": "pull", "NixlPullConnector": "pull", "NixlPushConnector": "push"}
    if transfer is None or transfer.kv_connector not in modes:
        return {}
    labels = {
        "engine_id": str(transfer.engine_id),
        "role": str(transfer.kv_role),
        "control_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        "control_port": str(envs.VLLM_NIXL_SIDE_CHANNEL_PORT),
        "tp_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "transfer_mode": modes[transfer.kv_connector],
    }
    return {"kvberth:engine_info": labels}


def _model_argument(value: str) -> str:
    """`--model` as vLLM wants it: the folder of a profile."""
    if not is_profile(value):
        return value
    try:
        return str(model_folder(value))
    except EmulatorError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _refuse_unsupported(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise EmulatorError("pipeline and context parallelism are not emulated: leave them at 1")
    if HEAD_SLOTS % parallel.tensor_parallel_size:
        raise EmulatorError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} is not emulated: it can be 1 or {HEAD_SLOTS}; "
            "a profile's timing is that of the whole engine, whatever this is"
        )
    for name, value in (
        ("speculative decoding", vllm_config.speculative_config),
        ("LoRA", vllm_config.lora_config),
    ):
        if value is not None:
            raise EmulatorError(f"{name} is not emulated")
    if vllm_config.model_config.runner_type != "generate":
        raise EmulatorError(f"runner {vllm_config.model_config.runner_type} is not emulated: it can be generate")
