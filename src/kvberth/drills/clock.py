"""A wall clock that a drill sets: `python -m kvberth.drills.clock FILE PYTHON -m MODULE ARGUMENT...` runs MODULE by it.

`time.time` and `time.time_ns` of that process, and of those that it forks, are off by what the file says at the moment.
Clocks that libraries in C read for themselves are not touched. The machine's own clock is nobody's to set.
"""

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

__all__ = ["CLOCK_FILE", "ClockFile", "bend"]

CLOCK_FILE = "KVBERTH_DRILL_CLOCK"
"""The environment variable that names an engine's file."""

_OFFSET = struct.Struct("d")


class ClockFile:
    """The file, mapped. Whoever drills makes it and sets the offset, the process under it asks."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _OFFSET.size)

    @classmethod
    def create(cls, path: Path) -> "ClockFile":
        """A new file: the clock is right. Raises `FileExistsError` if it is there."""
        with path.open("xb") as file:
            file.write(_OFFSET.pack(0.0))
        return cls(path)

    @property
    def offset_seconds(self) -> float:
        """By which the clock is ahead."""
        offset: float = _OFFSET.unpack_from(self._map)[0]
        return offset

    @offset_seconds.setter
    def offset_seconds(self, seconds: float) -> None:
        _OFFSET.pack_into(self._map, 0, seconds)


def bend(path: Path) -> None:
    """Let this process's wall clock follow the file; before others keep `time.time` under a name of their own."""
    clock, real, real_ns = ClockFile(path), time.time, time.time_ns
    time.time = lambda: real() + clock.offset_seconds
    time.time_ns = lambda: real_ns() + int(clock.offset_seconds * 1e9)


if __name__ == "__main__":
    _, file, _, flag, module, *arguments = sys.argv
    assert flag == "-m"
    bend(Path(file))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
