"""Regions of registered KV memory.

    layer-major (LBHNC), one region per layer:      block-major (BLHNC), all layers in one region:

    layer 0  |b0|b1|b2|...|                         |b0 l0|b0 l1|...|b1 l0|b1 l1|...|
    layer 1  |b0|b1|b2|...|                          <- block_length ->
                                                     block_stride == block_length

A layer of a block-major cache, taken for itself, has a stride of all layers' pages; `merge_adjacent` finds that the
layers' pages touch and makes one region of them, which divides the number of descriptors by the number of layers.
"""

from collections.abc import Sequence

import msgspec

__all__ = ["Region", "merge_adjacent"]


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Block `b` occupies `block_length` bytes from `address + b * block_stride`.

    Attributes:
        address: of block 0, in bytes, in the owner's address space.
        block_stride: bytes from one block to the next.
        block_length: bytes of one block in this region.
        device_index: of the accelerator that holds the memory; 0 for host memory.
    """

    address: int
    block_stride: int
    block_length: int
    device_index: int = 0

    @property
    def is_contiguous(self) -> bool:
        """Neighbouring blocks touch, so a run of them is one descriptor."""
        return self.block_stride == self.block_length


def merge_adjacent(regions: Sequence[Region]) -> tuple[Region, ...]:
    """The same memory in fewer regions.

    Two neighbours in the list become one when they have the same stride and device and the page of the second begins
    where the page of the first ends, in every block. The order is kept, since it is what pairs the layers of two
    engines: their addresses do not.
    """
    merged: list[Region] = []
    for region in regions:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.device_index == region.device_index
            and last.block_stride == region.block_stride
            and last.address + last.block_length == region.address
            and last.block_length + region.block_length <= region.block_stride
        ):
            merged[-1] = msgspec.structs.replace(last, block_length=last.block_length + region.block_length)
        else:
            merged.append(region)
    return tuple(merged)
