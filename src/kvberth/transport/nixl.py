"""NIXL behind the seam: the only module that imports it.

NIXL's progress thread is off, since it spins a whole core even when idle; instead the mover calls `progress` and
`is_done` about once per millisecond while transfers are live, on both sides. NIXL cannot cancel: a handle that is
released in flight goes on in the background, so `release` is called only for transfers that have ended.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from kvberth.layout import Region, Runs
from kvberth.transport.base import Direction, Handle, TransportError
from kvberth.transport.tcp import (
    abort_connections,
    abort_muted_connections,
    discard_unsent_on_close,
    mute_connections,
)

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError as error:  # pragma: no cover - depends on the machine
    raise ImportError(
        "NIXL is not installed: `pip install kvberth[vllm]` beside vLLM, or `kvberth[cpu]` without a GPU"
    ) from error

__all__ = ["MemoryType", "NixlTransport"]

_log = logging.getLogger(__name__)

_DISCONNECTED = "NIXL_ERR_REMOTE_DISCONNECT"
"""The name of the status, which is all that the text of NIXL's error has."""


class _Disconnected(TransportError):
    """The connection with the peer has failed, perhaps long ago."""


@dataclass(frozen=True, slots=True)
class _Posted:
    handle: Any
    direction: Direction
    peer: str


class MemoryType(StrEnum):
    """NIXL's name of the memory that holds the KV cache."""

    HOST = "DRAM"
    DEVICE = "VRAM"


class NixlTransport:
    """One NIXL agent with one back end. See `kvberth.transport.Transport` for the contract.

    Args:
        name: unique among all agents that may ever meet, restarts included.
        memory_type: of all registered memory.
        backend: NIXL's back end, such as UCX or LIBFABRIC.

    Raises:
        TransportError: the agent or its back end cannot be made.
    """

    def __init__(self, name: str, memory_type: MemoryType, backend: str = "UCX") -> None:
        config = nixl_agent_config(enable_prog_thread=False, backends=[backend])
        self._memory_type = memory_type.value
        self._backend = backend
        try:
            self._agent = nixl_agent(name, config)
        except Exception as error:  # NIXL raises classes of its C++ binding, with no common base
            raise TransportError(f"no NIXL agent with back end {backend}: {error}") from error
        if backend not in self._agent.backends:
            raise TransportError(f"NIXL has no back end {backend}; it has {sorted(self._agent.plugin_list)}")
        self._registered: list[Any] = []
        self._posted: dict[Handle, _Posted] = {}
        self._metadata: dict[str, bytes] = {}
        self._leaving: dict[str, bytes] = {}
        self._discarding: set[str] = set()
        self._numbers = itertools.count(1)

    def register(self, regions: Sequence[Region], num_blocks: int) -> None:
        rows = np.array(
            [
                (each.address, (num_blocks - 1) * each.block_stride + each.block_length, each.device_index)
                for each in regions
            ],
            dtype=np.uint64,
        )
        try:
            registered = self._agent.register_memory(rows, self._memory_type, backends=[self._backend])
        except Exception as error:
            raise TransportError(f"{self._memory_type} memory cannot be registered with NIXL: {error}") from error
        self._registered.append(registered)

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        for peer, known in self._leaving.items():
            if known == metadata:  # it is back before our last READ of it has come to an end
                self._metadata[peer] = self._leaving.pop(peer)
                return peer
        abort_muted_connections(metadata)
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"NIXL refuses the peer's metadata: {error}") from error
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._metadata[peer] = metadata
        return peer

    def remove_peer(self, name: str, *, is_live: bool) -> None:
        theirs = self._metadata.pop(name, None)
        if theirs is None:
            raise TransportError(f"no peer {name}")
        if self._is_reading(name) and mute_connections(self.metadata(), theirs):
            self.progress()  # what has come by now lands in blocks that are still there
            self._remove(name)
            return
        abort_connections(self.metadata(), theirs, accepted=is_live)
        if self._is_reading(name):
            # Of a transfer with an agent that it does not know any more, NIXL says that it has failed, whether it goes
            # on or not.
            self._leaving[name] = theirs
        else:
            self._remove(name)

    def post(self, direction: Direction, peer: str, runs: Runs) -> Handle:
        if peer not in self._metadata:
            raise TransportError(f"no peer {peer}")
        try:
            handle = self._post(direction, peer, runs)
        except _Disconnected as error:
            # NIXL never connects again by itself. What fails for this is sent anew, over a connection of its own.
            if any(posted.peer == peer for posted in self._posted.values()):
                raise
            _log.info("kvberth: connecting to %s anew: %s", peer, error)
            self._remove(peer)
            self.add_peer(self._metadata[peer])
            handle = self._post(direction, peer, runs)
        number = Handle(next(self._numbers))
        self._posted[number] = _Posted(handle, direction, peer)
        return number

    def _post(self, direction: Direction, peer: str, runs: Runs) -> Any:
        try:
            handle = self._agent.initialize_xfer(
                direction.value,
                self._agent.get_xfer_descs(runs.local, self._memory_type),
                self._agent.get_xfer_descs(runs.remote, self._memory_type),
                peer,
                backends=[self._backend],
            )
        except Exception as error:
            raise TransportError(f"NIXL cannot prepare a {direction} with {peer}: {error}") from error
        try:
            status = self._agent.transfer(handle)
        except Exception as error:
            self._release(handle)
            kind = _Disconnected if _DISCONNECTED in str(error) else TransportError
            raise kind(f"NIXL cannot post a {direction} with {peer}: {error}") from error
        if status == "ERR":
            self._release(handle)
            raise TransportError(f"NIXL cannot post a {direction} with {peer}")
        return handle

    def is_done(self, handle: Handle) -> bool:
        posted = self._posted[handle]
        try:
            status = self._agent.check_xfer_state(posted.handle)
        except Exception as error:  # a dead peer shows as an exception, not as a state
            raise TransportError(f"{type(error).__name__}: {error}") from error
        if status == "ERR":
            raise TransportError("NIXL reports an error of the transfer")
        if status != "DONE":
            return False
        if posted.direction is Direction.WRITE:
            self._note_connection(posted.peer)
        return True

    def release(self, handle: Handle) -> None:
        posted = self._posted.pop(handle)
        self._release(posted.handle)
        if posted.peer in self._leaving and not self._is_reading(posted.peer):
            del self._leaving[posted.peer]
            self._remove(posted.peer)

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        for handle in list(self._posted):
            self.release(handle)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        del self._agent

    def _is_reading(self, peer: str) -> bool:
        return any(posted.peer == peer and posted.direction is Direction.READ for posted in self._posted.values())

    def _remove(self, name: str) -> None:
        self._discarding.discard(name)
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise TransportError(f"NIXL cannot remove peer {name}: {error}") from error

    def _note_connection(self, peer: str) -> None:
        """The first WRITE to a peer has been done, so its connections are there, if it has any.

        Those over which we only READ are closed as usual: what we have asked for lands nowhere when we have ended, and
        one that is about to answer had better not be reset (see `transport.tcp`).
        """
        theirs = self._metadata.get(peer)
        if theirs is not None and peer not in self._discarding:
            self._discarding.add(peer)
            discard_unsent_on_close(self.metadata(), theirs)

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise TransportError(f"NIXL cannot release a transfer: {error}") from error
