"""One producer, three consumers and a network that cannot be trusted: the movers' real cores, and everything around them.

The world does what engines, sockets, processes and the clock do, one step at a time, and looks after each whether the
promises hold. What a step is, and which come, is the walk's business (`test_random_walks.py`). A core takes its turns
as the mover's thread gives them to it: when something has come for it, and when it has asked to be woken.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.protocol.fabric import NUM_BLOCKS, Agent, Fabric, Memory, Post

from kvberth.layout import Fingerprint, Region, num_blocks_for
from kvberth.mover import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    Command,
    DeclineRequest,
    EndPrefill,
    FinishPrefill,
    RestartPrefill,
    TransferReport,
)
from kvberth.mover.core import Core
from kvberth.mover.inbox import Outbox
from kvberth.protocol import End, EngineCard, Reason, ReportReceived, Timing, TransferKey, TransferMode
from kvberth.protocol.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    RequestDeclined,
    RequestWaiting,
)
from kvberth.protocol.ids import RequestId, Role

__all__ = ["ATTEMPTS", "CONSUMERS", "KEYS", "PRODUCER", "TRANSFERS", "Connection", "Prefill", "Rank", "Wait", "World"]

BLOCK_SIZE, PORT = 16, 14579
PRODUCER, CONSUMERS = "P", ("D0", "D1", "D2")
ATTEMPTS = 3
TIMING = Timing(deadline_seconds=100.0)
STEP_SECONDS = 0.25
"""The longest that an engine oversleeps."""

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

    @property
    def keys(self) -> tuple[TransferKey, ...]:
        return tuple(key for key in KEYS if key.transfer_id == self.transfer)

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
    """

    rank: "Rank"
    route: bytes
    is_open: bool = True
    to_producer: list[bytes] = field(default_factory=list)
    to_consumer: list[tuple[int, bytes]] = field(default_factory=list)


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
            fingerprint=_FINGERPRINT,
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

    def dial(self, address: str) -> None:
        assert address == f"{PRODUCER}:{PORT}"
        self.world.connect(self)

    def hang_up(self, address: str) -> None:
        connection = self.world.connection_of(self)
        assert connection is not None
        connection.is_open = False
        connection.to_consumer.clear()

    def send_to_client(self, route: bytes, frame: bytes) -> None:
        for connection in self.world.connections:
            if connection.route == route and connection.is_open and connection.rank.agent.is_alive:
                connection.to_consumer.append((self.incarnation, frame))

    def send_to_server(self, address: str, frame: bytes) -> None:
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
            if memory is self.memory and is_ours:
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


class World:
    """See the module."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.fabric = Fabric()
        self.connections: list[Connection] = []
        self.ranks: dict[str, Rank] = {}
        self.prefills: list[Prefill] = []
        self.attempts: dict[TransferKey, set[int]] = {key: set() for key in KEYS}
        self.completions: Counter[tuple[TransferKey, int]] = Counter()
        self._counter = 0
        for name in (PRODUCER, *CONSUMERS):
            self.ranks[name] = Rank(self, name, 0)

    @property
    def producer(self) -> Rank:
        return self.ranks[PRODUCER]

    # Engines.

    def announce(self, transfer: str) -> None:
        request_id = RequestId(f"p-{self._next()}")
        prefill = Prefill(transfer, request_id, (), self._next())
        prefill.blocks = self.producer.memory.take(_num_blocks(transfer), prefill)
        self.producer.prefills[request_id] = prefill
        self.prefills.append(prefill)
        event = PrefillAnnounced(request_id, TRANSFERS[transfer], transfer.encode())
        self.producer.command(AnnouncePrefill(prefill.keys, event))

    def advance(self, prefill: Prefill, count: int, *, is_computed: bool) -> None:
        """A step has been launched that fills some blocks, and perhaps done already."""
        first, last = prefill.num_told, min(len(prefill.blocks), prefill.num_told + count)
        prefill.num_told = last
        gate = Gate(self.producer.memory, prefill, prefill.generation, range(first, last))
        if is_computed:
            gate.open()
        else:
            self.producer.gates.append(gate)
        event = PrefillAdvanced(first, prefill.blocks[first:last], last == len(prefill.blocks))
        self.producer.command(AdvancePrefill(prefill.keys, event, gate))

    def compute(self) -> None:
        """The accelerator has done all that was launched."""
        gates, self.producer.gates = self.producer.gates, []
        for gate in gates:
            gate.open()
        self.producer.run()

    def preempt(self, prefill: Prefill) -> None:
        """The blocks are somebody else's from now on."""
        old = prefill.blocks
        prefill.generation, prefill.num_told = self._next(), 0
        prefill.blocks = self.producer.memory.take(len(old), prefill)
        self.producer.memory.give_back(old)
        self.producer.command(RestartPrefill(prefill.keys, PrefillRestarted()))

    def finish(self, prefill: Prefill, *, is_complete: bool) -> None:
        """The engine is done with the request, with its KV complete or not."""
        if is_complete:
            Gate(self.producer.memory, prefill, prefill.generation, range(len(prefill.blocks))).open()
            self.compute()
        prefill.is_over = True
        if is_complete:
            self.producer.command(FinishPrefill(prefill.keys, PrefillFinished(prefill.blocks)))
        else:
            self.producer.command(EndPrefill(prefill.keys, PrefillAborted()))

    def bind(self, rank: Rank, key: TransferKey, attempt: int, mode: TransferMode, first: int) -> None:
        """A consumer's request waits for the KV of the prompt's blocks from `first` on."""
        self.attempts[key].add(attempt)
        wait = Wait(key, RequestId(f"d-{self._next()}"), attempt, first)
        wait.blocks = rank.memory.take(_num_blocks(key.transfer_id) - first, wait)
        rank.waits[wait.request_id] = wait
        tokens, digest = TRANSFERS[key.transfer_id], key.transfer_id.encode()
        event = RequestWaiting(wait.request_id, attempt, mode, first * BLOCK_SIZE, tokens, digest, wait.blocks)
        rank.command(AwaitRequest(key, PRODUCER, PORT, event))

    def decline(self, rank: Rank, key: TransferKey, attempt: int, reason: Reason) -> None:
        self.attempts[key].add(attempt)
        rank.command(DeclineRequest(key, PRODUCER, PORT, RequestDeclined(attempt, reason)))

    def abort(self, rank: Rank, wait: Wait) -> None:
        wait.is_aborted = True
        rank.command(AbortRequest(wait.key))

    # Processes.

    def kill(self, rank: Rank) -> None:
        rank.agent.is_alive = False

    def restart(self, name: str) -> None:
        """The same name and address, another incarnation that knows nothing."""
        self.ranks[name] = Rank(self, name, self.ranks[name].incarnation + 1)
        if name == PRODUCER:
            for connection in self.connections:
                connection.route = self._route()

    def stop(self, rank: Rank) -> None:
        rank.agent.is_stopped = True

    def wake(self, rank: Rank) -> None:
        rank.agent.is_stopped = False
        rank.run()

    # The network and the clock.

    def connect(self, rank: Rank) -> None:
        self.connections.append(Connection(rank, self._route()))

    def connection_of(self, rank: Rank) -> Connection | None:
        """The one that this start of an engine has open."""
        return next((each for each in self.connections if each.rank is rank and each.is_open), None)

    def to_producer(self, connection: Connection, at: int, *, keep: bool = False) -> None:
        """Deliver a frame; its connection may have been closed meanwhile, and its sender be dead."""
        frame = connection.to_producer[at] if keep else connection.to_producer.pop(at)
        core, route = self.producer.core, connection.route
        self.producer.run(lambda now: core.frame_from_client(route, frame, now))

    def to_consumer(self, connection: Connection, at: int, *, keep: bool = False) -> None:
        """Deliver a frame. Behind the first one of a new start of the producer, none of an older one can come."""
        sender, frame = connection.to_consumer[at] if keep else connection.to_consumer.pop(at)
        connection.to_consumer = [each for each in connection.to_consumer if each[0] >= sender]
        core = connection.rank.core
        connection.rank.run(lambda now: core.frame_from_server(f"{PRODUCER}:{PORT}", frame, now))

    def deliver(self) -> None:
        """Everything that is on the way, in order, and what is sent in answer."""
        for _ in range(100):
            is_quiet = True
            for connection in list(self.connections):
                if connection.to_producer and self.producer.is_awake:
                    self.to_producer(connection, 0)
                    is_quiet = False
                if connection.to_consumer and connection.rank.is_awake:
                    self.to_consumer(connection, 0)
                    is_quiet = False
            if is_quiet:
                return
        raise AssertionError("messages without end")

    def pass_time(self, seconds: float, *, is_connected: bool) -> None:
        """Engines that are awake wake up when they have asked to."""
        end = self.now + seconds
        while self.now < end:
            wakes = [rank.wakes_at for rank in self.ranks.values() if rank.is_awake and rank.wakes_at is not None]
            self.now = min(end, max(self.now + STEP_SECONDS, min(wakes, default=end)))
            for rank in self.ranks.values():
                if rank.is_awake and rank.wakes_at is not None and rank.wakes_at <= self.now:
                    rank.run()
            if is_connected:
                self.deliver()

    def land(self, post: Post) -> None:
        post.land()

    # Promises.

    def completed(self, key: TransferKey, first: int, contents: list[object]) -> None:
        """A consumer has been told that all is there."""
        if not contents:
            return
        generations = {content[1] for content in contents if isinstance(content, tuple)}
        wanted = [
            (key.transfer_id, generation, first + index)
            for generation in generations
            for index in range(len(contents))
        ]
        assert contents == wanted, f"wrong bytes for {key} from block {first} on: {contents}"
        (generation,) = generations
        self.completions[key, generation] += 1
        assert self.completions[key, generation] == 1, "handed over twice"

    def calm(self) -> None:
        """Faults are over: everybody wakes, what flies lands, messages arrive; then nothing is left."""
        for rank in self.ranks.values():
            if rank.agent.is_stopped and rank.agent.is_alive:
                self.wake(rank)
        self.producer.step_began = None
        if self.producer.is_awake:
            self.compute()
            for prefill in self.producer.prefills.values():
                if not prefill.is_over:
                    self.finish(prefill, is_complete=True)
        for _ in range(int(TIMING.deadline_seconds) + 40):
            self.deliver()
            for post in list(self.fabric.flying()):
                if post.owner.is_alive:
                    post.land()
            for rank in self.ranks.values():
                if rank.is_awake:
                    rank.run()
            self.pass_time(1.0, is_connected=True)
            if self.is_over():
                break
        assert self.is_over(), self.leftovers()
        self.pass_time(2 * TIMING.memory_seconds, is_connected=True)
        awake = [rank.name for rank in self.ranks.values() if rank.is_awake and rank.wakes_at is not None]
        assert not awake, f"{awake} still wait for something"
        self.check_agreement()

    def is_over(self) -> bool:
        """Whether no engine that lives waits for anything."""
        return not self.leftovers()

    def leftovers(self) -> list[object]:
        """What is not over."""
        alive = [rank for rank in self.ranks.values() if rank.agent.is_alive]
        waits = [wait for rank in alive for wait in rank.waits.values() if not wait.is_over]
        prefills = [prefill for rank in alive for prefill in rank.prefills.values() if not prefill.is_released]
        return [*waits, *prefills, *(post for post in self.fabric.flying() if post.owner.is_alive)]

    def check_agreement(self) -> None:
        """What a consumer was told has come, the producer has recorded as handed over, if it still lives."""
        ends = self.producer.ends
        for prefill in self.producer.prefills.values() if self.producer.is_awake else ():
            for key in prefill.keys:
                (end,) = [each for role, each_key, each in ends if each_key == key and role is Role.PRODUCER][-1:]
                assert not self.completions[key, prefill.generation] or end is End.COMPLETED, f"{key} {end} on P"

    def _route(self) -> bytes:
        return f"route {self._next()}".encode()

    def _next(self) -> int:
        self._counter += 1
        return self._counter


def _num_blocks(transfer: str) -> int:
    return num_blocks_for(TRANSFERS[transfer], BLOCK_SIZE)


_FINGERPRINT = Fingerprint(
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
