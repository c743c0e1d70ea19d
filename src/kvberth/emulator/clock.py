"""A wall clock that a drill sets.

`python -m kvberth.emulator.clock FILE PYTHON -m MODULE ARGUMENT...` runs MODULE by it.
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
_followed: "ClockFile | None" = None


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
    """Let this process's wall clock follow the file, from now on and in place of another one.

    The first call comes before others keep `time.time` under a name of their own.
    """
    global _followed
    is_first, _followed = _followed is None, ClockFile(path)
    if is_first:
        real, real_ns = time.time, time.time_ns
        time.time = lambda: real() + _offset_seconds()
        time.time_ns = lambda: real_ns() + int(_offset_seconds() * 1e9)


def _offset_seconds() -> float:
    return _followed.offset_seconds if _followed is not None else 0.0


if __name__ == "__main__":
    _, file, _, flag, module, *arguments = sys.argv
    assert flag == "-m"
    bend(Path(file))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
