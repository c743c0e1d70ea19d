"""From vLLM's KV cache tensors to regions."""

import re
from collections.abc import Mapping

import torch

from kvberth.layout import Region, merge_adjacent

__all__ = ["UnsupportedCacheError", "regions_of"]


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


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Layer 2 comes before layer 10, on every engine."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
