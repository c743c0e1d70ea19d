"""One end of a transfer over NIXL, in a process of its own: `test_late_bytes` says what to do, a line of JSON each."""

import base64
import json
import socket
import sys
import time

import numpy as np

from kvberth.layout import Region, Runs
from kvberth.transport.base import Direction, Handle, TransportError
from kvberth.transport.nixl import MemoryType, NixlTransport
from kvberth.transport.tcp import abort_connections, tcp_sockets

ROWS, ROW_BYTES = 64, 65_536
FILL = 7


class End:
    """An agent with its memory; each method is a command."""

    def __init__(self, name: str) -> None:
        self.memory = np.zeros((ROWS, ROW_BYTES), dtype=np.uint8)
        self.address = self.memory.ctypes.data
        self.transport = NixlTransport(f"{name}-{time.monotonic_ns()}", MemoryType.HOST)
        self.handle: Handle | None = None
        region = Region(address=self.address, block_stride=ROW_BYTES, block_length=ROW_BYTES)
        self.transport.register([region], ROWS)

    def card(self) -> tuple[str, int]:
        return base64.b64encode(self.transport.metadata()).decode(), self.address

    def meet(self, metadata: str, address: int) -> None:
        self.their_metadata, self.their_address = base64.b64decode(metadata), address
        self.peer = self.transport.add_peer(self.their_metadata)

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def values(self, first: int, last: int) -> list[int]:
        """What stands at the end of these rows of ours."""
        return [int(each) for each in self.memory[first:last, -1]]

    def read(self, first: int, last: int) -> None:
        """Post rows of theirs into the same rows of ours."""
        self._post(Direction.READ, first, last)

    def write(self, first: int, last: int) -> None:
        """Post rows of ours into the same rows of theirs."""
        self._post(Direction.WRITE, first, last)

    def _post(self, direction: Direction, first: int, last: int) -> None:
        local, remote = (
            np.array([[address + row * ROW_BYTES, ROW_BYTES, 0] for row in range(first, last)], dtype=np.uint64)
            for address in (self.address, self.their_address)
        )
        self.handle = self.transport.post(direction, self.peer, Runs(local, remote, 1))

    def await_done(self, seconds: float) -> bool:
        """Whether it is, within the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.transport.is_done(self.handle):
                self.transport.release(self.handle)
                self.handle = None
                return True
            time.sleep(0.001)
        return False

    def reset(self) -> int:
        """Cut all connections with the other side, as the network may; returns how many there were."""
        return abort_connections(self.transport.metadata(), self.their_metadata)

    def num_resetting(self) -> int:
        """How many connections the kernel resets when this process ends."""
        with tcp_sockets() as sockets:
            return sum(end.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)[:4] != bytes(4) for end in sockets)

    def forget(self, seconds: float) -> bool:
        """As the mover does with a lost peer; returns whether what we had posted has come to an end within the time."""
        self.transport.remove_peer(self.peer, is_live=True)
        if self.handle is None:
            return True
        try:
            return self.await_done(seconds)
        except TransportError:
            self.transport.release(self.handle)
            return True

    def progress(self, seconds: float) -> int:
        """Take what comes; returns how many rows are filled then."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.transport.progress()
            time.sleep(0.001)
        return int((self.memory == FILL).all(axis=1).sum())


def main(name: str) -> None:
    end = End(name)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(end, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
