"""The in-memory twin of a transport: same contract, bytes copied within one process, completion under control.

Useful for tests of anything above the seam; it is not a way to serve.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvberth.layout import Region, Runs
from kvberth.transport.base import Direction, Handle, TransportError

__all__ = ["MemoryFabric", "MemoryTransport"]


class _Card(msgspec.Struct, frozen=True):
    name: str
    spans: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class MemoryFabric:
    """What connects the agents of a test.

    Attributes:
        polls_until_done: how often `is_done` answers no before the bytes move, as if they were on a wire.
        broken: pairs (from, to) of agents between which transfers fail.
    """

    polls_until_done: int = 0
    agents: "dict[str, MemoryTransport]" = field(default_factory=dict)
    broken: set[tuple[str, str]] = field(default_factory=set)


@dataclass(slots=True)
class _Flight:
    """A transfer; `peer_progress` is how often its other side had been driven when it was last looked at."""

    direction: Direction
    peer: str
    runs: Runs
    polls_left: int
    peer_progress: int
    is_done: bool = False


class MemoryTransport:
    """An agent on a `MemoryFabric`. See `kvberth.transport.Transport` for the contract.

    As over TCP, bytes move only when the other side is driven too.
    """

    def __init__(self, name: str, fabric: MemoryFabric) -> None:
        self._name = name
        self._fabric = fabric
        self._spans: list[tuple[int, int]] = []
        self._peers: dict[str, _Card] = {}
        self._flights: dict[Handle, _Flight] = {}
        self._next_handle = 1
        self._progress = 0
        fabric.agents[name] = self

    def register(self, regions: Sequence[Region], num_blocks: int) -> None:
        for region in regions:
            length = (num_blocks - 1) * region.block_stride + region.block_length
            self._spans.append((region.address, region.address + length))

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Card(self._name, tuple(self._spans)))

    def add_peer(self, metadata: bytes) -> str:
        try:
            card = msgspec.msgpack.decode(metadata, type=_Card)
        except msgspec.MsgspecError as error:
            raise TransportError(f"not an agent's metadata: {error}") from error
        self._peers[card.name] = card
        return card.name

    def remove_peer(self, name: str, *, is_live: bool) -> None:
        if self._peers.pop(name, None) is None:
            raise TransportError(f"no peer {name}")

    def post(self, direction: Direction, peer: str, runs: Runs) -> Handle:
        card = self._peers.get(peer)
        if card is None:
            raise TransportError(f"no peer {peer}")
        _check_spans(self._spans, runs.local, "local")
        _check_spans(list(card.spans), runs.remote, "remote")
        handle = Handle(self._next_handle)
        self._next_handle += 1
        self._flights[handle] = _Flight(direction, peer, runs, self._fabric.polls_until_done, self._progress_of(peer))
        return handle

    def is_done(self, handle: Handle) -> bool:
        flight = self._flights[handle]
        if flight.is_done:
            return True
        is_gone = flight.peer not in self._peers or flight.peer not in self._fabric.agents
        if is_gone or (self._name, flight.peer) in self._fabric.broken:
            raise TransportError(f"peer {flight.peer} is gone")
        before, flight.peer_progress = flight.peer_progress, self._progress_of(flight.peer)
        if flight.peer_progress == before:
            return False
        if flight.polls_left > 0:
            flight.polls_left -= 1
            return False
        for (local, length, _), (remote, _, _) in zip(
            flight.runs.local.tolist(), flight.runs.remote.tolist(), strict=True
        ):
            source, target = (local, remote) if flight.direction is Direction.WRITE else (remote, local)
            ctypes.memmove(target, source, length)
        flight.is_done = True
        return True

    def release(self, handle: Handle) -> None:
        del self._flights[handle]

    def progress(self) -> None:
        self._progress += 1

    def close(self) -> None:
        self._fabric.agents.pop(self._name, None)
        self._flights.clear()

    def _progress_of(self, peer: str) -> int:
        agent = self._fabric.agents.get(peer)
        return agent._progress if agent is not None else 0


def _check_spans(spans: Sequence[tuple[int, int]], descriptors: npt.NDArray[np.uint64], side: str) -> None:
    """Every descriptor must lie in registered memory, as a real transport demands."""
    for address, length, _ in descriptors.tolist():
        if not any(start <= address and address + length <= end for start, end in spans):
            raise TransportError(f"{side} address {address:#x} with {length} bytes is not registered")
