"""Free ports that two clusters on one machine do not both find."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO, Self

__all__ = ["PortLease", "is_free"]

_RANGE = range(20_000, 32_000)
"""Below the kernel's range for outgoing connections, which would take a port between the look and the use."""


class PortLease:
    """Ports that are free and that no other lease of this machine holds, until `close` or the end of the `with`.

    A port is held by a lock on a file, since the process that is to bind it is another one and starts later.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._folder = Path(tempfile.gettempdir()) / f"kvberth-ports-{os.getuid()}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._held: list[IO[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, count: int = 1) -> int:
        """The first of `count` ports in a row.

        Raises:
            OSError: there are none.
        """
        for _ in range(1000):
            first = random.randrange(_RANGE.start, _RANGE.stop - count)  # noqa: S311 - not a secret
            files = [self._lock(port) for port in range(first, first + count)]
            held = [file for file in files if file is not None]
            if len(held) == count and all(is_free(self._host, port) for port in range(first, first + count)):
                self._held += held
                return first
            for file in held:
                file.close()
        raise OSError(f"no {count} free ports in a row between {_RANGE.start} and {_RANGE.stop}")

    def close(self) -> None:
        """Let all of them go."""
        for file in self._held:
            file.close()
        self._held.clear()

    def _lock(self, port: int) -> IO[str] | None:
        file = (self._folder / str(port)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Connections of the last one that still linger do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
