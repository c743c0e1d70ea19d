"""Two cores, P and D, on a wire of frames and a shared fabric, with a clock that the test turns."""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvberth.keys import Certificate
from kvberth.layout import Fingerprint, Region, Tokens
from kvberth.mover import AbortRequest, AnnouncePrefill, AwaitRequest, EndPrefill, FinishPrefill, Results
from kvberth.mover.address import Address
from kvberth.mover.core import Core
from kvberth.mover.inbox import Outbox
from kvberth.protocol import EngineCard, Timing, TransferKey, TransferMode
from kvberth.protocol.events import PrefillAborted, PrefillAnnounced, PrefillFinished, RequestWaiting
from kvberth.protocol.ids import RequestId
from kvberth.transport import MemoryFabric, MemoryTransport

NUM_BLOCKS, BLOCK_BYTES, BLOCK_SIZE = 32, 64, 16
KEY = TransferKey("t-1")
PORT = 14579
ADDRESS = Address(f"P:{PORT}")

FINGERPRINT = Fingerprint(
    model="m@1",
    dtype="float32",
    kv_cache_dtype="auto",
    num_layers=2,
    num_kv_heads=3,
    head_size=64,
    block_size=BLOCK_SIZE,
    layout="LBHNC",
    tensor_parallel_size=1,
    block_lengths=(BLOCK_BYTES, BLOCK_BYTES),
    tokens=Tokens(BLOCK_SIZE, 1, BLOCK_BYTES // BLOCK_SIZE),
)


def fingerprint(factor: int = 1, **changes: object) -> Fingerprint:
    """Of an engine whose blocks are so many times larger."""
    sizes = {
        "block_size": BLOCK_SIZE * factor,
        "block_lengths": (BLOCK_BYTES * factor, BLOCK_BYTES * factor),
        "tokens": Tokens(BLOCK_SIZE * factor, 1, BLOCK_BYTES // BLOCK_SIZE),
    }
    return msgspec.structs.replace(FINGERPRINT, **(sizes | changes))


@dataclass
class Wire:
    """One engine's end of the control channel: frames that it has sent and nobody has delivered."""

    dialled: list[Address] = field(default_factory=list)
    hung_up: list[Address] = field(default_factory=list)
    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)
    gone: set[bytes] = field(default_factory=set)
    to_servers: list[tuple[Address, bytes]] = field(default_factory=list)

    def resolve(self, address: Address, now: float) -> Address:
        return address

    def dial(self, address: Address) -> None:
        self.dialled.append(address)

    def hang_up(self, address: Address) -> None:
        self.hung_up.append(address)

    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        if route in self.gone:
            return False
        self.to_clients.append((route, frame))
        return True

    def send_to_server(self, address: Address, frame: bytes) -> None:
        self.to_servers.append((address, frame))


class Engine:
    """A rank: memory, transport, core."""

    def __init__(
        self,
        name: str,
        fabric: MemoryFabric,
        *,
        incarnation: str = "a",
        rank: int = 0,
        fill: int = 0,
        factor: int = 1,
        **changes: object,
    ) -> None:
        self.name = name
        self.wire = Wire()
        self.outbox = Outbox()
        length = BLOCK_BYTES * factor
        self.memory = np.full((2, NUM_BLOCKS, length), fill, dtype=np.uint8)
        self.transport = MemoryTransport(f"{name}/0/{incarnation}", fabric)
        regions = tuple(
            Region(address=layer.ctypes.data, block_stride=length, block_length=length) for layer in self.memory
        )
        self.transport.register(regions, NUM_BLOCKS)
        card = EngineCard(
            engine_id=name,
            incarnation=incarnation,
            rank=rank,
            fingerprint=fingerprint(factor, **changes),
            regions=regions,
            num_blocks=NUM_BLOCKS,
            agent_metadata=self.transport.metadata(),
        )
        self.timing = Timing()
        self.core = Core(card, self.transport, self.wire, self.outbox, self.timing)


class Rig:
    """P and D. `settle` runs both until nothing moves without time passing."""

    def __init__(self, *, producer_factor: int = 1, consumer_factor: int = 1, **consumer_changes: object) -> None:
        self.fabric = MemoryFabric()
        self.now = 1000.0
        self.key = KEY
        self.producer = Engine("P", self.fabric, fill=1, factor=producer_factor)
        self.consumer = Engine("D", self.fabric, fill=2, factor=consumer_factor, **consumer_changes)
        self.route = b"route-D"
        self.sender: Certificate | None = None  # what D has proved to be
        self.is_cut = False
        self.to_others: list[tuple[bytes, bytes]] = []  # what P has sent to other routes
        self.results = {"P": Results(), "D": Results()}

    def announce(self) -> None:
        event = PrefillAnnounced(RequestId("p-1"), 40, b"digest")
        self.producer.core.command(AnnouncePrefill((self.key,), event), self.now)

    def finish(self, blocks: tuple[int, ...] = (1, 2, 3)) -> None:
        self.producer.memory[:, list(blocks)] = np.arange(50, 50 + len(blocks), dtype=np.uint8)[None, :, None]
        self.producer.core.command(FinishPrefill((self.key,), PrefillFinished(blocks)), self.now)

    def abort_prefill(self) -> None:
        self.producer.core.command(EndPrefill((self.key,), PrefillAborted()), self.now)

    def wait(self, mode: TransferMode, blocks: tuple[int, ...] = (7, 8, 9)) -> None:
        event = RequestWaiting(RequestId("d-1"), 0, mode, 0, 40, b"digest", blocks)
        self.consumer.core.command(AwaitRequest(self.key, "P", PORT, event), self.now)

    def abort(self) -> None:
        self.consumer.core.command(AbortRequest(self.key), self.now)

    def settle(self, turns: int = 30) -> "Rig":
        """Deliver frames and run turns, without time passing."""
        for _ in range(turns):
            for address, frame in taken(self.consumer.wire.to_servers):
                if address == ADDRESS and not self.is_cut:
                    self.producer.core.frame_from_client(self.route, frame, self.now, self.sender)
            for route, frame in taken(self.producer.wire.to_clients):
                if route != self.route:
                    self.to_others.append((route, frame))
                elif not self.is_cut:
                    self.consumer.core.frame_from_server(ADDRESS, frame, self.now)
            for engine in (self.producer, self.consumer):
                engine.core.look(self.now)
                engine.core.turn(self.now)
                self._collect(engine)
        return self

    def pass_time(self, seconds: float, step: float = 0.5) -> "Rig":
        """Let time pass in steps, as an engine that is awake does."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.settle(3)
        return self

    def restart_producer(self) -> None:
        """The same address, another incarnation, empty memory."""
        self.producer.transport.close()
        self.producer = Engine("P", self.fabric, incarnation="b", fill=1)

    def restart_consumer(self) -> None:
        self.consumer.transport.close()
        self.consumer = Engine("D", self.fabric, incarnation="b", fill=2)
        self.route = b"route-D-again"

    def received(self) -> list[tuple[str, bool, str]]:
        """(request, ok, reason) of what D has reported."""
        return [(each.request_id, each.ok, str(each.reason)) for each in self.results["D"].received]

    def released(self) -> set[str]:
        return {str(each) for each in self.results["P"].released}

    def has_bytes(self, blocks: tuple[int, ...] = (7, 8, 9)) -> bool:
        """Whether P's blocks stand in D's, and nowhere else."""
        expected = np.full_like(self.consumer.memory, 2)
        expected[:, list(blocks)] = np.arange(50, 50 + len(blocks), dtype=np.uint8)[None, :, None]
        return bool((self.consumer.memory == expected).all())

    def _collect(self, engine: Engine) -> None:
        results = engine.outbox.take()
        total = self.results[engine.name]
        total.released |= results.released
        total.received += results.received
        total.reports += results.reports
        total.heartbeats_missed += results.heartbeats_missed


def taken(queue: list) -> list:
    frames = list(queue)
    queue.clear()
    return frames
