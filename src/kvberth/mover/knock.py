"""Is anybody listening at an address? ZeroMQ does not tell "refused" from "no answer"; the difference is certainty.

A refusal comes from the machine itself: the process that listened there is gone, and writes to nobody any more. No
answer may be a broken network behind which it lives on.
"""

import errno
import os
import select
import socket
from typing import Any

__all__ = ["Knock"]


class Knock:
    """Connection attempts to one address, none of which waits. Used by the mover's thread only.

    Args:
        address: `host:port`. A host name is not looked up, since that would wait: only where a connection has led.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._attempt: socket.socket | None = None
        self._is_refused = False
        self._target: tuple[socket.AddressFamily, Any] | None = None
        try:
            found = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except OSError:
            return
        family, _, _, _, target = found[0]
        self._target = family, target

    def remember(self, file_descriptor: int) -> None:
        """A connection has been made: this is where it leads, if it still exists."""
        try:
            with socket.socket(fileno=os.dup(file_descriptor)) as connected:
                self._target = connected.family, connected.getpeername()
        except OSError:
            pass

    def try_now(self) -> None:
        """Begin an attempt; an earlier one that has no answer is given up."""
        self._look()
        self.close()
        if self._target is None:
            return
        family, target = self._target
        self._attempt = socket.socket(family, socket.SOCK_STREAM)
        self._attempt.setblocking(False)
        self._settle(self._attempt.connect_ex(target))

    def is_refused(self) -> bool:
        """Whether an attempt has been refused since the last call."""
        self._look()
        refused, self._is_refused = self._is_refused, False
        return refused

    def close(self) -> None:
        """Give up the attempt under way."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _look(self) -> None:
        if self._attempt is not None and select.select([], [self._attempt], [], 0)[1]:
            self._settle(self._attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _settle(self, error: int) -> None:
        if error == errno.EINPROGRESS:
            return
        self._is_refused = self._is_refused or error == errno.ECONNREFUSED
        self.close()
