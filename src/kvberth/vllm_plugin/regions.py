"""From vLLM's KV cache tensors to regions."""

import re
from collections.abc import Collection, Mapping

import torch

from kvberth.layout import Region, Tokens, merge_adjacent

__all__ = ["UnsupportedCacheError", "regions_of", "tokens_of"]


class UnsupportedCacheError(ValueError):
    """A KV cache whose blocks this connector cannot address."""


def regions_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> tuple[Region, ...]:
    """The regions of all layers, in the layers' natural order.

    Args:
        kv_caches: a tensor per layer, whose first dimension counts blocks, or a whole multiple of them where the
            attention kernel's blocks are smaller than the engine's.
        num_blocks: the engine's blocks.

    Raises:
        UnsupportedCacheError: a layer's first dimension does not count blocks, or a block's bytes are scattered.
    """
    regions = []
    for name in sorted(kv_caches, key=_natural):
        tensor = kv_caches[name]
        if tensor.shape[0] % num_blocks or tensor.shape[0] == 0:
            raise UnsupportedCacheError(
                f"layer {name}: the first dimension of its KV cache {tuple(tensor.shape)} is not a multiple of "
                f"the {num_blocks} blocks"
            )
        kernel_blocks = tensor.shape[0] // num_blocks
        block = tensor[:kernel_blocks]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
        if extent != block.numel():
            raise UnsupportedCacheError(
                f"layer {name}: a block's bytes do not lie together (shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}); choose another KV cache layout"
            )
        regions.append(
            Region(
                address=tensor.data_ptr(),
                block_stride=tensor.stride(0) * kernel_blocks * tensor.element_size(),
                block_length=block.numel() * tensor.element_size(),
                device_index=tensor.device.index or 0,
            )
        )
    return merge_adjacent(regions)


_TOKENS_WHERE_STRIDES_SAY = {"EMULATED", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
"""Attention backends that keep each token where the tensor's strides say. The CPU's does not: its kernel packs the keys
of a block's tokens together. Of one that is not named here nothing is believed."""


def tokens_of(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_size: int, backends: Collection[str]
) -> Tokens | None:
    """How the tokens of each layer lie within a block; None if that differs or cannot be told.

    Args:
        kv_caches: a tensor per layer; where it has vLLM's four dimensions (kernel blocks, heads, tokens, content), the
            strides tell.
        num_blocks: the engine's blocks.
        block_size: tokens per block of the engine.
        backends: vLLM's names of the attention backends that use the memory.
    """
    if not _TOKENS_WHERE_STRIDES_SAY.issuperset(backends):
        return None
    found = {_tokens_of(tensor, num_blocks, block_size) for tensor in kv_caches.values()}
    return found.pop() if len(found) == 1 else None


def _tokens_of(tensor: torch.Tensor, num_blocks: int, block_size: int) -> Tokens | None:
    if tensor.dim() != 4 or tensor.shape[2] * (tensor.shape[0] // num_blocks) != block_size:
        return None
    _, heads, page_size, content = tensor.shape
    _, head_stride, token_stride, content_stride = tensor.stride()
    item = tensor.element_size()
    if content_stride == 1 and token_stride == content and head_stride == page_size * content:
        return Tokens(page_size, heads, content * item)
    if content_stride == 1 and head_stride == content and token_stride == heads * content:
        return Tokens(page_size, 1, heads * content * item)
    return None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Layer 2 comes before layer 10, on every engine."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
