"""Faults of the transfer library, on demand: a small file that the engine maps and a drill writes, while both run.

Each kind of fault has a share, from 0 to 1, of the transfers that it hits.
"""

import mmap
import random
from pathlib import Path

import numpy as np

__all__ = ["FAULTS", "FaultFile"]

FAULTS = ("post", "transfer")
"""`post`: NIXL refuses to post. `transfer`: it reports an error where a transfer has ended."""

_SIZE = len(FAULTS) * 8


class FaultFile:
    """The file, mapped. Whoever drills makes it and sets shares, engines ask."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._shares = np.frombuffer(self._map, dtype=np.float64)
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
        """Whether this transfer is hit."""
        share = float(self._shares[FAULTS.index(name)])
        return share > 0 and self._chance.random() < share
