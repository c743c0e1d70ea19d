"""From pairs of blocks to the descriptors of a transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvberth.layout.regions import Region

__all__ = ["Descriptors", "LayoutError", "Runs", "plan_runs"]

Descriptors = npt.NDArray[np.uint64]


class LayoutError(ValueError):
    """Blocks and regions that do not fit each other."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The descriptors of one transfer; row i of `local` and of `remote` are the two ends of the same bytes.

    Attributes:
        local: shape (n, 3), uint64: address, length in bytes, device index.
        remote: the same on the other side.
        num_runs: pieces of neighbouring blocks; a region that is not contiguous needs a descriptor per block instead.
    """

    local: Descriptors
    remote: Descriptors
    num_runs: int

    def __len__(self) -> int:
        return int(self.local.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes that the transfer moves."""
        return int(self.local[:, 1].sum())

    def batches(self, size: int) -> "list[Runs]":
        """The same descriptors in pieces of at most `size`."""
        return [
            Runs(self.local[at : at + size], self.remote[at : at + size], self.num_runs)
            for at in range(0, len(self), size)
        ]


def plan_runs(
    local_regions: Sequence[Region],
    remote_regions: Sequence[Region],
    local_blocks: Sequence[int],
    remote_blocks: Sequence[int],
) -> Runs:
    """The descriptors that move block `local_blocks[i]` to or from `remote_blocks[i]`, in every region.

    The pairs are sorted first: an engine hands out freed blocks in reversed order, and only neighbours in ascending
    order become one run. A run is coalesced where both sides are contiguous.

    Raises:
        LayoutError: different numbers of regions or blocks, pages of different lengths, or a block named twice.
    """
    if len(local_regions) != len(remote_regions):
        raise LayoutError(f"{len(local_regions)} local regions, {len(remote_regions)} remote ones")
    if len(local_blocks) != len(remote_blocks):
        raise LayoutError(f"{len(local_blocks)} local blocks, {len(remote_blocks)} remote ones")
    local_ids = np.asarray(local_blocks, dtype=np.int64)
    remote_ids = np.asarray(remote_blocks, dtype=np.int64)
    order = np.argsort(local_ids)
    local_ids, remote_ids = local_ids[order], remote_ids[order]
    for name, ids in (("local", local_ids), ("remote", np.sort(remote_ids))):
        if (ids[1:] == ids[:-1]).any():
            raise LayoutError(f"a {name} block is named twice")
    starts, counts = _coalesce(local_ids, remote_ids)

    local_parts: list[Descriptors] = []
    remote_parts: list[Descriptors] = []
    for ours, theirs in zip(local_regions, remote_regions, strict=True):
        if ours.block_length != theirs.block_length:
            raise LayoutError(f"a block has {ours.block_length} bytes here and {theirs.block_length} there")
        if ours.is_contiguous and theirs.is_contiguous:
            first_local, first_remote, lengths = local_ids[starts], remote_ids[starts], counts * ours.block_length
        else:
            first_local, first_remote = local_ids, remote_ids
            lengths = np.full(len(local_ids), ours.block_length, dtype=np.int64)
        local_parts.append(_descriptors(ours, first_local, lengths))
        remote_parts.append(_descriptors(theirs, first_remote, lengths))
    if not local_parts:
        raise LayoutError("no regions")
    return Runs(np.concatenate(local_parts), np.concatenate(remote_parts), len(starts))


def _coalesce(
    local_ids: npt.NDArray[np.int64], remote_ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions at which runs start, and how many blocks each has."""
    breaks = np.flatnonzero((np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1)) + 1
    starts = np.concatenate(([0], breaks))[: len(local_ids)].astype(np.int64)
    return starts, np.diff(np.append(starts, len(local_ids)))


def _descriptors(region: Region, first_blocks: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Descriptors:
    """Rows of (address, length, device index)."""
    rows = np.empty((len(first_blocks), 3), dtype=np.uint64)
    rows[:, 0] = region.address + first_blocks * region.block_stride
    rows[:, 1] = lengths
    rows[:, 2] = region.device_index
    return rows
