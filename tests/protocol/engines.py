"""Engines of a walk: what is around a mover's core in a process, and what the engine has in hand."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.protocol.fabric import NUM_BLOCKS, Agent, Memory

from kvberth.layout import Fingerprint, Region, num_blocks_for
from kvberth.mover import Command, TransferReport
from kvberth.mover.address import Address
from kvberth.mover.core import Core
from kvberth.mover.inbox import Outbox
from kvberth.protocol import End, EngineCard, ReportReceived, Timing, TransferKey
from kvberth.protocol.ids import RequestId, Role
from kvberth.transport import Direction

if TYPE_CHECKING:
    from tests.protocol.world import World

__all__ = [
    "ADDRESS",
    "BLOCK_SIZE",
    "CONSUMERS",
    "FINGERPRINT",
    "KEYS",
    "PORT",
    "PRODUCER",
    "TIMING",
    "TRANSFERS",
    "Connection",
    "Gate",
    "Prefill",
    "Rank",
    "Wait",
    "num_blocks",
]

BLOCK_SIZE, PORT = 16, 14579
PRODUCER, CONSUMERS = "P", ("D0", "D1", "D2")
ADDRESS = Address(f"{PRODUCER}:{PORT}")
TIMING = Timing(deadline_seconds=100.0)
TRANSFERS = {"one": 40, "two": 48}
"""Tokens of the prompts: three blocks each, with and without a partial one. The second is wanted twice (n = 2)."""

KEYS = (TransferKey("one"), TransferKey("two", 0), TransferKey("two", 1))


@dataclass(eq=False)
class Prefill:
    """A request on the producer.

    Attributes:
        generation: which computation its blocks hold; no two in the world are alike.
        num_told: blocks that the mover has been told of.
        is_over: the engine is done with it.
    """

    transfer: str
    request_id: RequestId
    blocks: tuple[int, ...]
    generation: int
    num_told: int = 0
    is_over: bool = False
    is_released: bool = False
    was_preempted: bool = False

    @property
    def keys(self) -> tuple[TransferKey, ...]:
        return tuple(key for key in KEYS if key.transfer_id == self.transfer)

    @property
    def owner(self) -> object:
        """Whose its blocks are: those of an earlier computation were somebody else's in between."""
        return (self.request_id, self.generation)

    def content(self, place: int, generation: int | None = None) -> object:
        """What the block at a place of the prompt holds once it is computed."""
        return (self.transfer, self.generation if generation is None else generation, place)


@dataclass(eq=False)
class Gate:
    """A fence behind a forward pass that fills some of a request's blocks."""

    memory: Memory
    prefill: Prefill
    generation: int
    places: range
    is_open: bool = False

    def query(self) -> bool:
        return self.is_open

    def open(self) -> None:
        """The forward pass is done; blocks that were taken away meanwhile are not touched by it any more."""
        self.is_open = True
        if self.generation == self.prefill.generation and not self.prefill.is_released:
            for place in self.places:
                self.memory.contents[self.prefill.blocks[place]] = self.prefill.content(place)


@dataclass(eq=False)
class Wait:
    """A request on a consumer; its blocks are for the prompt's places from `first` on."""

    key: TransferKey
    request_id: RequestId
    attempt: int
    first: int
    blocks: tuple[int, ...] = ()
    is_aborted: bool = False
    is_over: bool = False


@dataclass(eq=False)
class Connection:
    """A consumer's control channel to the producer's address.

    Attributes:
        route: the producer's name for it; another one for each start of the producer.
        to_producer, to_consumer: frames on the way, the latter with the start that sent them.
        at_producer, at_consumer: those that have arrived last, which may arrive once more.
    """

    rank: "Rank"
    route: bytes
    is_open: bool = True
    to_producer: list[bytes] = field(default_factory=list)
    to_consumer: list[tuple[int, bytes]] = field(default_factory=list)
    at_producer: deque[bytes] = field(default_factory=lambda: deque(maxlen=12))
    at_consumer: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=12))


class Rank(Outbox):
    """One start of an engine: its process, which is also the wire and the outbox of its core."""

    def __init__(self, world: "World", name: str, incarnation: int) -> None:
        super().__init__()
        self.world, self.name, self.incarnation = world, name, incarnation
        self.memory = Memory()
        self.agent = Agent(f"{name}/0/{incarnation}", world.fabric, self.memory)
        region = Region(address=0, block_stride=1, block_length=1)
        card = EngineCard(
            engine_id=name,
            incarnation=str(incarnation),
            rank=0,
            fingerprint=FINGERPRINT,
            regions=(region,),
            num_blocks=NUM_BLOCKS,
            agent_metadata=self.agent.metadata(),
        )
        self.core = Core(card, self.agent, self, self, TIMING)
        self.wakes_at: float | None = None
        self.step_began: float | None = None
        self.prefills: dict[RequestId, Prefill] = {}
        self.gates: list[Gate] = []
        self.waits: dict[RequestId, Wait] = {}
        self.ended_at: dict[TransferKey, float] = {}
        self.ends: list[tuple[Role, TransferKey, End]] = []

    @property
    def is_awake(self) -> bool:
        """Whether the process can do anything."""
        return self.agent.is_alive and not self.agent.is_stopped

    def run(self, *works: Callable[[float], None]) -> None:
        """One turn of the mover's thread, as `Mover` gives it."""
        now = self.world.now
        self.core.look(now)
        for work in works:
            work(now)
        self.core.turn(now, self.step_began)
        sleep = self.core.next_wakeup(now)
        self.wakes_at = None if sleep is None else now + sleep

    def command(self, command: Command) -> None:
        self.run(lambda now: self.core.command(command, now))

    def is_live(self, key: TransferKey) -> bool:
        """Whether the engine has a request that waits for this transfer, so that vLLM lets no other one begin."""
        return any(wait.key == key and not wait.is_over for wait in self.waits.values())

    # The control channel, as the core sees it.

    def resolve(self, address: Address, now: float) -> Address:
        return address

    def dial(self, address: Address) -> None:
        assert address == ADDRESS
        self.world.connect(self)

    def hang_up(self, address: Address) -> None:
        connection = self.world.connection_of(self)
        assert connection is not None
        connection.is_open = False
        connection.to_consumer.clear()

    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        is_connected = False
        for connection in self.world.connections:
            if connection.route == route and connection.is_open and connection.rank.agent.is_alive:
                connection.to_consumer.append((self.incarnation, frame))
                is_connected = True
        return is_connected

    def send_to_server(self, address: Address, frame: bytes) -> None:
        if (connection := self.world.connection_of(self)) is not None:
            connection.to_producer.append(frame)

    # What the core tells the engine.

    def released(self, request_id: RequestId) -> None:
        prefill = self.prefills[request_id]
        assert prefill.is_over, "released while the engine still has the request"
        assert not prefill.is_released, "released twice"
        for post in self.world.fabric.flying():
            memory, blocks = post.source
            is_ours = post.owner is self.agent or post.owner.name in self.agent.peers
            # Who READs from blocks that were taken away may find them again with the same request; it is told of it.
            is_stale = prefill.was_preempted and post.direction is Direction.READ
            if memory is self.memory and is_ours and prefill.owner in post.source_owners and not is_stale:
                assert not set(blocks) & set(prefill.blocks), f"released under a {post.direction}"
        prefill.is_released = True
        self.memory.give_back(prefill.blocks)

    def received(self, report: ReportReceived) -> None:
        wait = self.waits[report.request_id]
        assert not wait.is_over, "reported twice"
        for post in self.world.fabric.flying():
            memory, blocks = post.target
            if memory is self.memory:
                assert not set(blocks) & set(wait.blocks), f"given back under a {post.direction}"
        if report.ok:
            contents = [self.memory.contents[block] for block in wait.blocks]
            self.world.completed(wait.key, wait.first, contents)
        wait.is_over = True
        self.memory.give_back(wait.blocks)

    def report(self, report: TransferReport) -> None:
        record = report.record
        if record.role is Role.PRODUCER and any(record.key in each.keys for each in self.prefills.values()):
            last = self.ended_at.get(record.key, -TIMING.memory_seconds)
            assert self.world.now - last >= TIMING.memory_seconds, "ended twice"
            self.ended_at[record.key] = self.world.now
        self.ends.append((record.role, record.key, record.end))


def num_blocks(transfer: str) -> int:
    return num_blocks_for(TRANSFERS[transfer], BLOCK_SIZE)


FINGERPRINT = Fingerprint(
    model="m@1",
    dtype="float32",
    kv_cache_dtype="auto",
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    block_size=BLOCK_SIZE,
    layout="LBHNC",
    tensor_parallel_size=1,
    block_lengths=(1,),
)
