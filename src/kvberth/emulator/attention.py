"""Stand-ins for attention layers: vLLM asks them for the shape and the layout of the KV cache, and nothing else."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvberth.emulator.profile import HEAD_SLOTS, SLOT_BYTES, Profile

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EmulatedAttentionBackend", "EmulatedAttentionLayer"]


class EmulatedAttentionBackend(AttentionBackend):
    """Names the layouts: layer-major, and block-major (all layers of a block adjacent)."""

    @staticmethod
    def get_name() -> str:
        """As vLLM's logs show it."""
        return "EMULATED"

    @staticmethod
    def get_impl_cls() -> Any:
        """Never asked for: no layer runs."""
        raise NotImplementedError("an emulated layer has no implementation")

    @staticmethod
    def get_builder_cls() -> Any:
        """Never asked for: no layer runs."""
        raise NotImplementedError("an emulated layer has no metadata")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block of whole sixteens, taken as it is."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Most preferred first; a connector's wish or VLLM_KV_CACHE_LAYOUT chooses another."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def supports_pcp(cls) -> bool:
        """No context parallelism."""
        return False


class EmulatedAttentionLayer(AttentionLayerBase):
    """One layer of the profile."""

    def __init__(self, profile: Profile, tensor_parallel_size: int) -> None:
        self._profile = profile
        self._ranks = tensor_parallel_size
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The emulated one."""
        return EmulatedAttentionBackend

    def get_kv_cache_spec(self, vllm_config: "VllmConfig") -> KVCacheSpec:
        """The true heads, in pages of a few bytes per head slot and token."""
        model = self._profile.model
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=max(1, model.kv_heads // self._ranks),
            head_size=model.head_size,
            dtype=torch.bfloat16,
            num_head_slots=HEAD_SLOTS // self._ranks,
            state_content_bytes=SLOT_BYTES,
        )
