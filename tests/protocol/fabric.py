"""Memory of engines and what moves bytes between them, for walks through an adversarial world.

A block is one byte long and its content is an object: whose KV it is, of which computation, and of which place in the
prompt. A post lands or fails when the walk says so, and reads its source only then. What an engine gives back belongs
to a stranger at once.

Cutting off a peer ends one's own posts with it and nobody else's: measured with NIXL 1.5.1 over UCX, a producer's
WRITE lands after the consumer has removed the producer. What a process that is stopped or dead had posted is taken to
be over when its peer gives up on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from kvberth.layout import Region, Runs
from kvberth.transport import Direction, Handle, TransportError

__all__ = ["NUM_BLOCKS", "Agent", "Fabric", "Memory", "Post", "Progress"]

NUM_BLOCKS = 128


class Progress(Enum):
    """Where a post stands."""

    FLYING = auto()
    LANDED = auto()
    FAILED = auto()


class Memory:
    """The blocks of one start of an engine.

    Attributes:
        owners: the request that has the block; None for a stranger's.
        contents: what stands in it.
    """

    def __init__(self) -> None:
        self.owners: list[object] = [None] * NUM_BLOCKS
        self.contents: list[object] = [None] * NUM_BLOCKS
        self._free = [*range(0, NUM_BLOCKS, 2), *range(1, NUM_BLOCKS, 2)]  # no two neighbours in one request
        self._strangers = 0

    def take(self, count: int, owner: object) -> tuple[int, ...]:
        """Blocks for a request: those that were given back last."""
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self.owners[block] = owner
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """They are overwritten at once."""
        for block in blocks:
            self._strangers += 1
            self.owners[block], self.contents[block] = None, f"stranger {self._strangers}"
            self._free.append(block)


@dataclass(eq=False)
class Post:
    """One posted transfer.

    Attributes:
        source_owners, target_owners: who had the blocks when it was posted.
    """

    owner: "Agent"
    peer: "Agent"
    direction: Direction
    local: tuple[int, ...]
    remote: tuple[int, ...]
    progress: Progress = Progress.FLYING
    source_owners: tuple[object, ...] = ()
    target_owners: tuple[object, ...] = ()

    @property
    def source(self) -> tuple[Memory, tuple[int, ...]]:
        """Where the bytes come from."""
        here, there = (self.owner.memory, self.local), (self.peer.memory, self.remote)
        return here if self.direction is Direction.WRITE else there

    @property
    def target(self) -> tuple[Memory, tuple[int, ...]]:
        """Where they go."""
        here, there = (self.owner.memory, self.local), (self.peer.memory, self.remote)
        return there if self.direction is Direction.WRITE else here

    def owners_now(self) -> tuple[object, ...]:
        """Who has the blocks that are written."""
        memory, blocks = self.target
        return tuple(memory.owners[block] for block in blocks)

    def land(self) -> None:
        """The bytes arrive, as they stand now in their source."""
        if not self.peer.is_alive:
            self.progress = Progress.FAILED
            return
        assert self.owners_now() == self.target_owners, "bytes landed in blocks that were given back"
        (source, sources), (target, targets) = self.source, self.target
        for block, into in zip(sources, targets, strict=True):
            target.contents[into] = source.contents[block]
        self.progress = Progress.LANDED


@dataclass
class Fabric:
    """All agents and all posts that are in flight."""

    agents: "dict[str, Agent]" = field(default_factory=dict)
    posts: list[Post] = field(default_factory=list)

    def flying(self) -> list[Post]:
        """In the order of posting."""
        self.posts = [post for post in self.posts if post.progress is Progress.FLYING]
        return self.posts

    def fail(self, owner: "Agent", peer: "Agent | None" = None) -> None:
        """End what an agent has posted, to one peer or to all."""
        for post in self.flying():
            if post.owner is owner and peer in {None, post.peer}:
                post.progress = Progress.FAILED


class Agent:
    """An engine's end of the fabric. See `kvberth.transport.Transport` for the contract."""

    def __init__(self, name: str, fabric: Fabric, memory: Memory) -> None:
        self.name = name
        self.memory = memory
        self.is_alive = True
        self.is_stopped = False
        self.peers: dict[str, Agent] = {}
        self._fabric = fabric
        self._posts: dict[Handle, Post] = {}
        self._last_handle = 0
        fabric.agents[name] = self

    def register(self, regions: Sequence[Region], num_blocks: int) -> None:
        """All memory is."""

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode()
        self.peers[name] = self._fabric.agents[name]
        return name

    def remove_peer(self, name: str, *, is_live: bool) -> None:
        peer = self.peers.pop(name)
        self._fabric.fail(self, peer)
        if peer.is_stopped or not peer.is_alive:
            self._fabric.fail(peer, self)

    def post(self, direction: Direction, peer: str, runs: Runs) -> Handle:
        if peer not in self.peers:
            raise TransportError(f"no peer {peer}")
        post = Post(self, self.peers[peer], direction, _blocks(runs.local), _blocks(runs.remote))
        if post.peer.is_alive:
            assert None not in post.owners_now(), "posted to blocks that were given back"
        memory, blocks = post.source
        post.source_owners = tuple(memory.owners[block] for block in blocks)
        post.target_owners = post.owners_now()
        self._fabric.posts.append(post)
        self._last_handle += 1
        handle = Handle(self._last_handle)
        self._posts[handle] = post
        return handle

    def is_done(self, handle: Handle) -> bool:
        post = self._posts[handle]
        if post.progress is Progress.FAILED:
            raise TransportError("it failed")
        return post.progress is Progress.LANDED

    def release(self, handle: Handle) -> None:
        assert self._posts.pop(handle).progress is not Progress.FLYING, "forgotten in flight"

    def progress(self) -> None:
        """The walk does it."""

    def close(self) -> None:
        """The walk ends it."""


def _blocks(descriptors: npt.NDArray[np.uint64]) -> tuple[int, ...]:
    """One byte is one block."""
    return tuple(block for start, length, _ in descriptors.tolist() for block in range(start, start + length))
