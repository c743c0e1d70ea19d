"""The wire between engines: how long the true bytes of a transfer would take.

Each agent (one rank of an engine) has one line out and one line in, full duplex. A transfer holds the sender's line out
and the receiver's line in for its bytes at the slower of both rates, one transfer after another; then its latency
passes. Two transfers that share a line therefore take as long together as they would if they shared it evenly, and one
from an engine that is busy sending waits for it. Switches are taken to be ideal.

The lines are a small file that the engines of one machine map: contention is between processes. Times are
CLOCK_MONOTONIC, which they share.
"""

import fcntl
import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

__all__ = ["LineTable", "Wire"]

_LINES = 1024
_ROW = np.dtype([("name", "S16"), ("out_free_at", "f8"), ("in_free_at", "f8")])


class LineTable:
    """The lines of all agents on this machine, in a file.

    Args:
        path: of the file; made if it is not there. None is one per user in the system's temporary folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(tempfile.gettempdir()) / f"kvberth-emulated-links-{os.getuid()}"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, _LINES * _ROW.itemsize)
        self._map = mmap.mmap(self._file, _LINES * _ROW.itemsize)
        self._rows = np.frombuffer(self._map, dtype=_ROW)

    def reserve(self, sender: str, receiver: str, seconds: float, now: float) -> float:
        """Hold both lines for so long, as soon as both are free; returns when they are free again."""
        with self._locked():
            out = self._row(sender, now)
            into = self._row(receiver, now, but=out)
            begin = max(now, float(self._rows["out_free_at"][out]), float(self._rows["in_free_at"][into]))
            self._rows["out_free_at"][out] = begin + seconds
            self._rows["in_free_at"][into] = begin + seconds
            return begin + seconds

    def close(self) -> None:
        """Unmap and close; the file stays for others."""
        del self._rows
        self._map.close()
        os.close(self._file)

    def _row(self, agent: str, now: float, but: int | None = None) -> int:
        """The agent's row; for a new agent, the one that has been idle for longest, `but` for one."""
        name = hashlib.blake2b(agent.encode(), digest_size=15).digest().replace(b"\0", b"\1")
        (found,) = np.nonzero(self._rows["name"] == name)
        if len(found):
            return int(found[0])
        free_at = np.maximum(self._rows["out_free_at"], self._rows["in_free_at"])
        if but is not None:
            free_at[but] = np.inf
        row = int(np.argmin(free_at))
        # With zeros the next new agent would take this row too.
        self._rows[row] = (name, now, now)
        return row

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Wire:
    """The modelled time of transfers.

    Args:
        lines: of all agents.
        bandwidth_gbps: of one agent's line in each direction.
        latency_us: behind the last byte.
        bytes_scale: true bytes per byte that is copied.
    """

    def __init__(
        self,
        lines: LineTable,
        bandwidth_gbps: float,
        latency_us: float,
        bytes_scale: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = lines
        self._seconds_per_byte = bytes_scale * 8 / (bandwidth_gbps * 1e9)
        self._latency = latency_us * 1e-6
        self._clock = clock

    def completion_time(self, sender: str, receiver: str, copied_bytes: int) -> float:
        """When a transfer that begins now is complete at both ends."""
        free_at = self._lines.reserve(sender, receiver, copied_bytes * self._seconds_per_byte, self._clock())
        return free_at + self._latency
