"""One measurement from plan to figures: warm-up, traffic, records, summary."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import uvloop

from kvberth.bench.client import encode_request, send
from kvberth.bench.errors import TargetError
from kvberth.bench.interrupts import Interrupts
from kvberth.bench.machine import IdleMeter
from kvberth.bench.plan import Plan
from kvberth.bench.records import RequestRecord
from kvberth.bench.sending import encode_plan, send_all
from kvberth.bench.statistics import Summary, summarise
from kvberth.bench.target import Target, find_model, open_session

__all__ = ["Progress", "RunResult", "run", "run_blocking"]

_TICK_SECONDS = 1.0


@dataclass(slots=True)
class Progress:
    """How far a measurement is.

    Attributes:
        done: requests that have ended, those that failed, were cancelled or could not be sent included.
        elapsed_seconds: since the measurement started.
        planned_seconds: when its last request is due, follow-ups aside.
    """

    total: int
    planned_seconds: float
    sent: int = 0
    done: int = 0
    failed: int = 0
    elapsed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """A measurement that is over.

    Attributes:
        model: the name that was asked for.
        records: in the plan's order.
    """

    model: str
    records: tuple[RequestRecord, ...]
    summary: Summary


async def run(
    plan: Plan,
    target: Target,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_record: Callable[[RequestRecord], None] = lambda _: None,
) -> RunResult:
    """Send the plan's warm-up, one after another, then its requests at their times; returns when all have ended.

    Args:
        on_progress: called at the start, once a second and at the end.
        on_record: called when a request has ended, so in no fixed order.
    Both run between the arrivals of tokens, and must be quick.

    Raises:
        TargetError: the server names no model, or fails the warm-up. Requests that fail later are records.
    """
    async with open_session() as session:
        model = target.model or await find_model(session, target)
        await _warm_up(session, plan, target, model)
        return await _measure(session, plan, target, model, on_progress, on_record)


def run_blocking(
    plan: Plan,
    target: Target,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_record: Callable[[RequestRecord], None] = lambda _: None,
) -> RunResult:
    """`run`, in an event loop of its own: uvloop's, which leaves more of the processor to the servers.

    Raises `KeyboardInterrupt` too, behind what cleans up.
    """
    with Interrupts() as interrupts, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(interrupts.heed(lambda: run(plan, target, on_progress=on_progress, on_record=on_record)))


async def _warm_up(session: aiohttp.ClientSession, plan: Plan, target: Target, model: str) -> None:
    for planned in plan.warmup:
        outgoing = encode_request(planned, target, model)
        record = (await send(session, target, outgoing, start_ns=time.perf_counter_ns())).record
        if record.error is not None:
            raise TargetError(f"warm-up request {planned.index + 1} of {len(plan.warmup)} failed: {record.error}")


async def _measure(
    session: aiohttp.ClientSession,
    plan: Plan,
    target: Target,
    model: str,
    on_progress: Callable[[Progress], None],
    on_record: Callable[[RequestRecord], None],
) -> RunResult:
    conversations = encode_plan(plan, target, model)
    measurement = _Measurement(
        Progress(len(plan.requests), max((each.arrival_seconds for each in plan.requests), default=0.0)),
        on_progress,
        on_record,
    )
    async with measurement.ticking():
        await send_all(
            session,
            target,
            model,
            conversations,
            start_ns=measurement.start_ns,
            on_sent=measurement.count_sent,
            on_record=measurement.keep,
        )
    records = tuple(sorted(measurement.records, key=lambda record: record.index))
    return RunResult(model, records, summarise(records, idle_share=measurement.meter.idle_share))


@dataclass(slots=True)
class _Measurement:
    """What is counted while requests are on their way."""

    progress: Progress
    on_progress: Callable[[Progress], None]
    on_record: Callable[[RequestRecord], None]
    records: list[RequestRecord] = field(default_factory=list)
    meter: IdleMeter = field(default_factory=IdleMeter)
    start_ns: int = field(default_factory=time.perf_counter_ns)

    def count_sent(self) -> None:
        self.progress.sent += 1

    def keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.progress.done += 1
        self.progress.failed += record.error is not None
        self.on_record(record)

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Sample the machine and tell the progress: now, once a second, and when the context ends."""
        self.start_ns = time.perf_counter_ns()
        self._tick()
        ticker = asyncio.create_task(self._tick_on())
        try:
            yield
        finally:
            ticker.cancel()
            self._tick()

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._tick()

    def _tick(self) -> None:
        self.meter.sample()
        self.progress.elapsed_seconds = (time.perf_counter_ns() - self.start_ns) / 1e9
        self.on_progress(self.progress)
