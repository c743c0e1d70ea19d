"""Blocks of different sizes: where a token's bytes lie within a block, and the descriptors of whole tokens.

A block of a region is a sequence of layers, a layer of it a sequence of pages (the attention kernel's own blocks), and
a page a sequence of pieces in which the tokens follow each other:

    block     | layer 0                      | layer 1           ...   one layer in a layer-major region, all of them
    layer     | page 0        | page 1       | ...                      in a block-major one
    page      | piece 0 | piece 1 | ...                                 a piece per head (HNC), or one (NHC)
    piece     | token 0 | token 1 | ...

With equal block and page sizes whole blocks are copied (`plan_runs`), and nothing of this matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvberth.layout.regions import Region
from kvberth.layout.runs import Descriptors, LayoutError, Runs

__all__ = ["TokenSpace", "Tokens", "plan_tokens"]


class Tokens(msgspec.Struct, frozen=True):
    """How the tokens of a layer lie within a block.

    Attributes:
        page_size: tokens per page.
        num_pieces: pieces per page.
        token_bytes: bytes of one token in one piece.
    """

    page_size: int
    num_pieces: int
    token_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_size * self.num_pieces * self.token_bytes


@dataclass(frozen=True, slots=True)
class TokenSpace:
    """One side's memory, seen as tokens."""

    regions: Sequence[Region]
    block_size: int
    tokens: Tokens

    def offsets(self, block_length: int, step: int) -> npt.NDArray[np.int64]:
        """Where in a block its tokens' bytes begin, `step` tokens at a time.

        Returns:
            Shape (block_size / step, layers * pieces): bytes from the block's begin.
        """
        layer_bytes = self.block_size // self.tokens.page_size * self.tokens.page_bytes
        first = np.arange(0, self.block_size, step, dtype=np.int64)[:, None, None]
        layers = np.arange(block_length // layer_bytes, dtype=np.int64)[None, :, None] * layer_bytes
        pieces = np.arange(self.tokens.num_pieces, dtype=np.int64)[None, None, :]
        piece_bytes = self.tokens.page_size * self.tokens.token_bytes
        page = first // self.tokens.page_size * self.tokens.page_bytes
        within = first % self.tokens.page_size * self.tokens.token_bytes
        return (layers + page + within + pieces * piece_bytes).reshape(self.block_size // step, -1)


def plan_tokens(
    local: TokenSpace, remote: TokenSpace, local_units: Sequence[int], remote_units: Sequence[int], unit: int
) -> Runs:
    """The descriptors that move tokens between blocks of different sizes.

    Args:
        local, remote: both sides' memory.
        local_units, remote_units: which tokens, in units of `unit` tokens counted from the begin of block 0: unit i of
            one side goes to unit i of the other.
        unit: tokens per unit; divides both block sizes.

    Raises:
        LayoutError: sides that do not fit each other.
    """
    if len(local.regions) != len(remote.regions) or len(local_units) != len(remote_units):
        raise LayoutError(
            f"{len(local.regions)} local regions and {len(local_units)} units, "
            f"{len(remote.regions)} remote regions and {len(remote_units)} units"
        )
    step = min(unit, local.tokens.page_size, remote.tokens.page_size)
    ours = _steps(np.asarray(local_units, dtype=np.int64), unit // step)
    theirs = _steps(np.asarray(remote_units, dtype=np.int64), unit // step)
    length = step * local.tokens.token_bytes
    local_parts, remote_parts = [], []
    for mine, its in zip(local.regions, remote.regions, strict=True):
        local_parts.append(_rows(local, mine, ours, step, length))
        remote_parts.append(_rows(remote, its, theirs, step, length))
        if len(local_parts[-1]) != len(remote_parts[-1]):
            raise LayoutError(f"a block has {mine.block_length} bytes here and {its.block_length} there")
    if not local_parts:
        raise LayoutError("no regions")
    return _join_neighbours(np.concatenate(local_parts), np.concatenate(remote_parts))


def _steps(units: npt.NDArray[np.int64], steps_per_unit: int) -> npt.NDArray[np.int64]:
    """Units in finer units."""
    return (units[:, None] * steps_per_unit + np.arange(steps_per_unit, dtype=np.int64)).reshape(-1)


def _rows(space: TokenSpace, region: Region, steps: npt.NDArray[np.int64], step: int, length: int) -> Descriptors:
    """A descriptor for each step, layer and piece."""
    steps_per_block = space.block_size // step
    offsets = space.offsets(region.block_length, step)[steps % steps_per_block]
    addresses = region.address + (steps // steps_per_block * region.block_stride)[:, None] + offsets
    rows = np.empty((addresses.size, 3), dtype=np.uint64)
    rows[:, 0] = addresses.reshape(-1)
    rows[:, 1] = length
    rows[:, 2] = region.device_index
    return rows


def _join_neighbours(local: Descriptors, remote: Descriptors) -> Runs:
    """Descriptors whose bytes follow each other on both sides become one."""
    order = np.argsort(local[:, 0], kind="stable")
    local, remote = local[order], remote[order]
    follows = np.ones(max(0, len(local) - 1), dtype=bool)
    for side in (local, remote):
        follows &= (side[:-1, 0] + side[:-1, 1] == side[1:, 0]) & (side[:-1, 2] == side[1:, 2])
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))[: len(local)].astype(np.int64)
    lengths = np.add.reduceat(local[:, 1], starts) if len(local) else local[:0, 1]
    local, remote = local[starts].copy(), remote[starts].copy()
    local[:, 1] = remote[:, 1] = lengths
    return Runs(local, remote, len(starts))
