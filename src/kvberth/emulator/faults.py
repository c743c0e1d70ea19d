"""Faults of the transfer library, on demand: a small file that the engine maps and a drill writes, while both run.

Each kind of fault has a share, from 0 to 1, of the transfers that it hits, and a count of those that it has hit.
"""

import mmap
import random
from pathlib import Path

import numpy as np

__all__ = ["FAULTS", "FaultFile"]

FAULTS = ("post", "transfer")
"""`post`: NIXL refuses to post. `transfer`: it reports an error where a transfer has ended."""

_SIZE = 2 * len(FAULTS) * 8


class FaultFile:
    """The file, mapped. Whoever drills makes it and sets shares, engines ask."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._shares, self._hits = np.frombuffer(self._map, dtype=np.float64).reshape(2, len(FAULTS))
        self._chance = random.Random(0)  # noqa: S311 - not a secret

    @classmethod
    def create(cls, path: Path) -> "FaultFile":
        """A new file, without faults. Raises `FileExistsError` if it is there."""
        with path.open("xb") as file:
            file.write(bytes(_SIZE))
        return cls(path)

    def set(self, **shares: float) -> None:
        """Set the shares that are named."""
        for name, share in shares.items():
            self._shares[FAULTS.index(name)] = share

    def strikes(self, name: str) -> bool:
        """Whether this transfer is hit. One process asks: its count is kept without a lock."""
        share = float(self._shares[FAULTS.index(name)])
        is_hit = share > 0 and self._chance.random() < share
        self._hits[FAULTS.index(name)] += is_hit
        return is_hit

    def hits(self) -> int:
        """Transfers that were hit since the file was made, by faults of all kinds."""
        return int(self._hits.sum())
