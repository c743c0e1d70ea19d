"""What one transfer costs the thread that plans and posts it, between two processes over NIXL.

`Flights` runs here as the mover runs it: planned, posted in batches, looked at once per millisecond. Beside it stands
what a connector with a descriptor per layer and block does: everything in one post, in the order of the block tables,
either described anew each time or picked by index from lists that were prepared beforehand, as vLLM's connectors do.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from benchmarks.mover_memory import Layout, Memory
from nixl._api import nixl_agent, nixl_agent_config

from kvberth.layout import Region, Runs, plan_runs
from kvberth.mover.flights import Flights
from kvberth.protocol import TransferKey
from kvberth.transport import Direction
from kvberth.transport.nixl import MemoryType, NixlTransport

__all__ = ["Blocks", "Case", "Order", "Poster", "Rig", "Sample", "cases", "merged_in_order", "serve_target"]

_LOOK_SECONDS = 0.001
"""Between two looks at the transport, as in the mover."""

Blocks = tuple[Sequence[int], Sequence[int]]
"""Of the sender and of the receiver, pairwise."""


class Order(StrEnum):
    """How the blocks of a transfer lie: all in a row, as engines hand them out after a while, or at random."""

    CONTIGUOUS = "contiguous"
    EQUAL = "steady, one length"
    MIXED = "steady, mixed lengths"
    SORTED = "the same, free lists sorted"
    FRAGMENTED = "fragmented"


class Poster(StrEnum):
    """Who plans and posts."""

    FLIGHTS = "kvberth"
    NAIVE = "naive"
    PREPARED = "naive, lists prepared"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    poster: Poster
    layout: Layout
    order: Order
    page_bytes: int


@dataclass(frozen=True)
class Sample:
    """One transfer.

    Attributes:
        plan_ms: from block ids to descriptors.
        post_ms: in NIXL, until everything is posted. Over shared memory it copies the bytes, too.
        landed_ms: from the first to the moment the end is seen, on the wall's clock.
        thread_cpu_ms: all that the thread did meanwhile.
    """

    descriptors: int
    plan_ms: float
    post_ms: float
    landed_ms: float
    thread_cpu_ms: float


def cases(page_bytes: Sequence[int]) -> list[Case]:
    """The two baselines in each order, and the mover in each layout and order."""
    rows = [(Poster.NAIVE, Layout.LAYER_MAJOR), (Poster.PREPARED, Layout.LAYER_MAJOR)]
    rows += [(Poster.FLIGHTS, layout) for layout in Layout]
    return [Case(*row, order, size) for size, row, order in itertools.product(page_bytes, rows, Order)]


def merged_in_order(pairs: Blocks) -> int:
    """What is left of one descriptor per block when neighbours are merged in the order given, as NIXL does it with
    prepared lists."""
    ours, theirs = (np.asarray(each) for each in pairs)
    return 1 + int(np.count_nonzero((np.diff(ours) != 1) | (np.diff(theirs) != 1)))


def serve_target(pipe: Connection, shapes: Sequence[tuple[Layout, int, int, int]]) -> None:
    """The receiver's process: says where its memory lies, drives its transport, answers what its blocks hold."""
    memories = [Memory.make(*shape, seed=2) for shape in shapes]
    transport = NixlTransport("benchmark/receiver", MemoryType.HOST)
    for memory in memories:
        transport.register(memory.regions, memory.num_blocks)
    pipe.send((transport.metadata(), [memory.regions for memory in memories]))
    while True:
        if pipe.poll(_LOOK_SECONDS):
            if (asked := pipe.recv()) is None:
                break
            number, blocks = asked
            pipe.send(memories[number].checksum(blocks))
        transport.progress()
    transport.close()


@dataclass
class _Side:
    """Memory of one shape here, and its twin there."""

    memory: Memory
    remote: tuple[Region, ...]


class Rig:
    """The sender's process. Steps of the caller: `measure` each case, `check` what has arrived."""

    def __init__(self, pipe: Connection, shapes: Sequence[tuple[Layout, int, int, int]]) -> None:
        self._pipe = pipe
        memories = [Memory.make(*shape, seed=1) for shape in shapes]
        metadata, remote = pipe.recv()
        self._numbers = {(shape[0], shape[3]): number for number, shape in enumerate(shapes)}
        self._sides = [_Side(memory, regions) for memory, regions in zip(memories, remote, strict=True)]
        self._transport = NixlTransport("benchmark/sender", MemoryType.HOST)
        for memory in memories:
            self._transport.register(memory.regions, memory.num_blocks)
        self._peer = self._transport.add_peer(metadata)
        self._flights = Flights(self._transport)
        self._keys = itertools.count()
        self._baselines = {
            shape[3]: _Baseline(side, metadata)
            for shape, side in zip(shapes, self._sides, strict=True)
            if shape[0] is Layout.LAYER_MAJOR
        }

    def measure(self, case: Case, pairs: Blocks) -> Sample:
        """One transfer."""
        if case.poster is not Poster.FLIGHTS:
            return self._baselines[case.page_bytes].measure(case.poster, pairs)
        side = self._sides[self._numbers[case.layout, case.page_bytes]]
        plan = partial(plan_runs, side.memory.regions, side.remote, *pairs)
        plan_seconds = 0.0

        def timed_plan() -> Runs:
            nonlocal plan_seconds
            began = time.perf_counter()
            runs = plan()
            plan_seconds = time.perf_counter() - began
            return runs

        key = TransferKey(str(next(self._keys)))
        cpu, began = time.thread_time(), time.perf_counter()
        self._flights.extend(key, Direction.WRITE, self._peer, timed_plan, is_last=True)
        while not (landings := list(self._flights.advance())):
            if not self._flights.has_news:
                time.sleep(_LOOK_SECONDS)
            self._transport.progress()
            self._flights.look()
        landed, cpu = time.perf_counter() - began, time.thread_time() - cpu
        (landing,) = landings
        if landing.error:
            raise RuntimeError(landing.error)
        post_seconds = self._flights.take_effort(key).post_seconds - plan_seconds
        return Sample(landing.num_descriptors, 1e3 * plan_seconds, 1e3 * post_seconds, 1e3 * landed, 1e3 * cpu)

    def check(self, case: Case, pairs: Blocks) -> None:
        """Raises if the receiver's blocks do not hold the sender's bytes."""
        number = self._numbers[case.layout, case.page_bytes]
        ours, theirs = pairs
        self._pipe.send((number, list(theirs)))
        if self._pipe.recv() != self._sides[number].memory.checksum(ours):
            raise RuntimeError(f"{case}: the bytes have not arrived as they were")

    def close(self) -> None:
        for each in self._baselines.values():
            each.close()
        self._transport.close()
        self._pipe.send(None)


class _Baseline:
    """A descriptor per layer and block, through NIXL alone, in one post."""

    def __init__(self, side: _Side, metadata: bytes) -> None:
        self._side = side
        memory = side.memory
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"benchmark/baseline/{memory.page_bytes}", config)
        length = memory.num_blocks * memory.page_bytes
        rows = np.array([(region.address, length, 0) for region in memory.regions], dtype=np.uint64)
        self._registered = self._agent.register_memory(rows, "DRAM")
        self._peer = self._agent.add_remote_agent(metadata)
        every_block = np.arange(memory.num_blocks, dtype=np.uint64)
        self._lists = [
            self._agent.prep_xfer_dlist(name, self._pages(regions, every_block), "DRAM")
            for name, regions in (("NIXL_INIT_AGENT", memory.regions), (self._peer, side.remote))
        ]

    def _pages(self, regions: Sequence[Region], blocks: Any) -> Any:
        """A row of (address, length, device index) per layer and block."""
        addresses = np.array([region.address for region in regions], dtype=np.uint64)
        size = np.uint64(self._side.memory.page_bytes)
        rows = np.zeros((len(addresses) * len(blocks), 3), dtype=np.uint64)
        rows[:, 0] = (addresses[:, None] + blocks[None, :] * size).ravel()
        rows[:, 1] = size
        return rows

    def _indices(self, blocks: Any) -> Any:
        """Of the same rows in a list of all blocks."""
        firsts = np.arange(self._side.memory.num_layers, dtype=np.int32) * self._side.memory.num_blocks
        return (firsts[:, None] + blocks[None, :].astype(np.int32)).ravel()

    def measure(self, poster: Poster, pairs: Blocks) -> Sample:
        cpu, began = time.thread_time(), time.perf_counter()
        blocks = [np.asarray(each, dtype=np.uint64) for each in pairs]
        if poster is Poster.NAIVE:
            regions = (self._side.memory.regions, self._side.remote)
            rows = [self._pages(*each) for each in zip(regions, blocks, strict=True)]
            planned = time.perf_counter()
            ours, theirs = (self._agent.get_xfer_descs(each, "DRAM") for each in rows)
            handle = self._agent.initialize_xfer("WRITE", ours, theirs, self._peer)
        else:
            rows = [self._indices(each) for each in blocks]
            planned = time.perf_counter()
            handle = self._agent.make_prepped_xfer("WRITE", self._lists[0], rows[0], self._lists[1], rows[1])
        status = self._agent.transfer(handle)
        posted = time.perf_counter()
        while status == "PROC":
            time.sleep(_LOOK_SECONDS)
            status = self._agent.check_xfer_state(handle)
        if status != "DONE":
            raise RuntimeError(f"NIXL reports {status} for the transfer")
        landed, cpu = time.perf_counter(), time.thread_time() - cpu
        self._agent.release_xfer_handle(handle)
        times = (planned - began, posted - planned, landed - began, cpu)
        count = self._side.memory.num_layers * merged_in_order(pairs) if poster is Poster.PREPARED else len(rows[0])
        return Sample(count, *(1e3 * each for each in times))

    def close(self) -> None:
        for each in self._lists:
            self._agent.release_dlist_handle(each)
        self._agent.deregister_memory(self._registered)
