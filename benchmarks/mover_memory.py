"""KV memory as an engine has it, for the mover's benchmarks: two layouts, small pages."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvberth.layout import Region

__all__ = ["Layout", "Memory"]


class Layout(StrEnum):
    """vLLM's LBHNC and BLHNC."""

    LAYER_MAJOR = "layer-major"
    BLOCK_MAJOR = "block-major"


@dataclass(frozen=True)
class Memory:
    """The pages of all layers and blocks, and where they lie.

    Attributes:
        pages: shape (layers, blocks, page_bytes) where the layout is layer-major, or else (blocks, layers, page_bytes).
    """

    layout: Layout
    num_layers: int
    num_blocks: int
    page_bytes: int
    pages: npt.NDArray[np.uint8] = field(repr=False)

    @classmethod
    def make(cls, layout: Layout, num_layers: int, num_blocks: int, page_bytes: int, seed: int) -> "Memory":
        """Filled, so that every page is really there and copies of it can be told from others."""
        outer = (num_layers, num_blocks) if layout is Layout.LAYER_MAJOR else (num_blocks, num_layers)
        pages = np.frombuffer(bytearray(num_layers * num_blocks * page_bytes), dtype=np.uint8)
        pages = pages.reshape(*outer, page_bytes)
        # One random row for all pages, plus a number of their own: quick, and no page is like its neighbours.
        row = np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8)
        for number, part in enumerate(pages):
            part[:] = row + np.arange(outer[1], dtype=np.uint8)[:, None] * 3 + np.uint8(number * 7 % 256)
        return cls(layout, num_layers, num_blocks, page_bytes, pages)

    @property
    def regions(self) -> tuple[Region, ...]:
        """One per layer, or one for all."""
        address = self.pages.ctypes.data
        if self.layout is Layout.BLOCK_MAJOR:
            length = self.num_layers * self.page_bytes
            return (Region(address=address, block_stride=length, block_length=length),)
        layer_bytes = self.num_blocks * self.page_bytes
        return tuple(
            Region(address=address + layer * layer_bytes, block_stride=self.page_bytes, block_length=self.page_bytes)
            for layer in range(self.num_layers)
        )

    def checksum(self, blocks: Sequence[int]) -> int:
        """Of the blocks' bytes, in the order given; equal after a transfer on both sides."""
        ids = list(blocks)
        held = self.pages[:, ids] if self.layout is Layout.LAYER_MAJOR else self.pages[ids]
        return zlib.crc32(np.ascontiguousarray(held))
