"""The engine's side of the fingerprint, as far as vLLM's configuration knows it."""

import hashlib
import json
from pathlib import PurePath
from typing import Any, TypedDict

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

__all__ = ["EngineFacts", "attention_backends", "facts_of"]

_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


class EngineFacts(TypedDict):
    """`kvberth.layout.Fingerprint` without what only the KV cache's tensors tell."""

    model: str
    dtype: str
    kv_cache_dtype: str
    num_kv_heads: int
    head_size: int
    block_size: int
    layout: str
    tensor_parallel_size: int


def facts_of(vllm_config: VllmConfig) -> EngineFacts:
    """What the configuration says. The same model under another path is the same model."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    layout = cache.get_resolved_kv_cache_layout()
    return EngineFacts(
        model=f"{PurePath(model.model).name}@{_digest(model.hf_config.to_dict())}",
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(cache.cache_dtype),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        block_size=cache.block_size,
        layout=layout.name,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
    )


def attention_backends(vllm_config: VllmConfig) -> set[str]:
    """vLLM's names of those that use the KV cache; known in a worker, once the model is loaded."""
    return {backend.get_name() for backend in get_current_attn_backends(vllm_config)}


def _digest(config: dict[str, Any]) -> str:
    facts = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
