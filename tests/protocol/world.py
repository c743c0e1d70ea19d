"""One producer, three consumers and a network that cannot be trusted: real cores, and everything around them.

The world does what engines, sockets, processes and the clock do, one step at a time. What a step is, and which come, is
the walk's business (`test_random_walks.py`). A core takes its turns as the mover's thread gives them to it: when
something has come for it, and when it has asked to be woken. The promises are held where they could be broken: in the
fabric, when bytes are posted and land; in a rank, when it gives blocks back; and here, when all is over.
"""

from collections import Counter

from tests.protocol.engines import (
    ADDRESS,
    BLOCK_SIZE,
    CONSUMERS,
    KEYS,
    PORT,
    PRODUCER,
    TIMING,
    TRANSFERS,
    Connection,
    Gate,
    Prefill,
    Rank,
    Wait,
    num_blocks,
)
from tests.protocol.fabric import Fabric

from kvberth.mover import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    DeclineRequest,
    EndPrefill,
    FinishPrefill,
    RestartPrefill,
)
from kvberth.protocol import End, Reason, TransferKey, TransferMode
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

__all__ = ["ATTEMPTS", "World"]

ATTEMPTS = 3
"""That a transfer can have, each at one consumer."""

STEP_SECONDS = 0.25
"""The longest that an engine oversleeps."""


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
        prefill.blocks = self.producer.memory.take(num_blocks(transfer), prefill.owner)
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
        prefill.was_preempted = True
        prefill.generation, prefill.num_told = self._next(), 0
        prefill.blocks = self.producer.memory.take(len(old), prefill.owner)
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
        wait.blocks = rank.memory.take(num_blocks(key.transfer_id) - first, wait)
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

    def break_connection(self, connection: Connection, *, is_seen_by_producer: bool) -> None:
        """What is on the way is lost, and ZeroMQ connects again; nobody listens where the producer is dead."""
        for frames in (connection.to_producer, connection.to_consumer, connection.at_producer, connection.at_consumer):
            frames.clear()
        connection.route = self._route()
        core, address = connection.rank.core, ADDRESS
        connection.rank.run(lambda now: core.server_broke(address, now))
        if not self.producer.agent.is_alive:
            connection.rank.run(lambda now: core.server_refuses(address, now))
        elif is_seen_by_producer and self.producer.is_awake:
            self.producer.run(self.producer.core.clients_broke)

    def connection_of(self, rank: Rank) -> Connection | None:
        """The one that this start of an engine has open."""
        return next((each for each in self.connections if each.rank is rank and each.is_open), None)

    def to_producer(self, connection: Connection, frame: bytes) -> None:
        """A frame arrives; its connection may have been closed meanwhile, and its sender be dead."""
        connection.at_producer.append(frame)
        core, route = self.producer.core, connection.route
        self.producer.run(lambda now: core.frame_from_client(route, frame, now))

    def to_consumer(self, connection: Connection, sender: int, frame: bytes) -> None:
        """A frame arrives. Behind the first one of a new start of the producer, none of an older one can come."""
        connection.to_consumer = [each for each in connection.to_consumer if each[0] >= sender]
        if connection.at_consumer and connection.at_consumer[-1][0] < sender:
            connection.at_consumer.clear()
        connection.at_consumer.append((sender, frame))
        core = connection.rank.core
        connection.rank.run(lambda now: core.frame_from_server(ADDRESS, frame, now))

    def deliver(self, rounds: int | None = None) -> None:
        """What is on the way, in order, and what is sent in answer: a frame of each connection per round."""
        for _ in range(rounds or 1000):
            is_quiet = True
            for connection in list(self.connections):
                if connection.to_producer and self.producer.is_awake:
                    self.to_producer(connection, connection.to_producer.pop(0))
                    is_quiet = False
                if connection.to_consumer and connection.rank.is_awake:
                    self.to_consumer(connection, *connection.to_consumer.pop(0))
                    is_quiet = False
            if is_quiet:
                return
        assert rounds, "messages without end"

    def settle(self) -> None:
        """What is in flight lands where the other side drives its transport, and everybody hears of it."""
        driven = {rank.agent.name for rank in self.ranks.values() if rank.core.is_moving()}
        for post in list(self.fabric.flying()):
            # With the dead it ends when it is cut off.
            if post.owner.is_alive and post.peer.is_alive and post.peer.name in driven:
                post.land()
        for rank in self.ranks.values():
            if rank.is_awake:
                rank.run()
        self.deliver()

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

    # Promises.

    def completed(self, key: TransferKey, first: int, contents: list[object]) -> None:
        """A consumer has been told that all is there."""
        if not contents:
            return
        generations = {content[1] for content in contents if isinstance(content, tuple)}
        wanted = [
            (key.transfer_id, generation, first + index) for generation in generations for index in range(len(contents))
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
            self.settle()
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
                if self.completions[key, prefill.generation]:
                    assert (Role.PRODUCER, key, End.COMPLETED) in ends, f"{key} has not come to P's knowledge"

    def _route(self) -> bytes:
        return f"route {self._next()}".encode()

    def _next(self) -> int:
        self._counter += 1
        return self._counter
