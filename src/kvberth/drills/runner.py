"""Runs one drill: traffic, a fault at a random moment of it, the return to order, the verdict.

traffic   |------------------------ open loop ------------------------|  last answers  settle  look
fault           |--- hold ---|  (restart)    whole |--- reaction ---|
requests  right, or excused if under way then      all right, and handed over

Nothing is waited for longer than it takes: a fault that the router must notice ends soon after it has, the traffic some
seconds after the cluster is whole again, the drill when nothing is held and no file is open any more.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvberth.drills.catalogue import Drill
from kvberth.drills.client import TrafficClock, send_all
from kvberth.drills.cluster import ENGINES, MODEL, DrillCluster
from kvberth.drills.faults import Fault
from kvberth.drills.health import HealthSample, Outage, untruths
from kvberth.drills.judge import Outcome, Window, judge, objections
from kvberth.drills.results import DrillRow
from kvberth.drills.states import (
    EngineState,
    ProcessState,
    failed_handoffs,
    growth,
    held_blocks,
    leftovers,
    new_corruptions,
)
from kvberth.drills.traffic import TrafficShape, first_seconds, plan_traffic
from kvberth.launch import LaunchError

__all__ = ["run_drill", "warm_up"]

_BEFORE_SECONDS = (0.5, 2.0)
"""The fault begins within these."""
_UNAWARE_SECONDS = (0.5, 2.0)
"""A fault that the router has noticed lasts for so much longer."""
_REACTION_SECONDS = 2.0
"""So long after a fault requests may still be sent where it was felt."""
_MENDING_SECONDS = 4.0
"""Where messages were lost, two engines may hear nothing of each other for so much longer, and hand nothing over: TCP
doubles its timeouts, so that it can wait for as long again as the fault has lasted before it sends anything, and an
answer to a greeting is waited for as long as silence is borne, 3 s."""
_AFTER_SECONDS = 2.0
"""Traffic goes on for so long after that, and is served rightly."""
_WHOLE_SECONDS = 60.0
"""A breaker's longest pause is 30 s, and then a request must come."""
_LOOK_SECONDS = 0.25
_QUIET_SECONDS = 6.0
"""Until idle connections between router and engines have been closed, at the latest."""


async def run_drill(
    cluster: DrillCluster, drill: Drill, *, seed: int, number: int, baseline: dict[str, ProcessState]
) -> DrillRow:
    """One drill, once.

    Args:
        number: of the round, for the row.
        baseline: the processes before the first drill; those that are started anew here take their places.

    Raises:
        LaunchError: the cluster is not whole again afterwards, so that no other drill can follow.
    """
    chance = random.Random(seed)  # noqa: S311 - not a secret
    victims = chance.choice(drill.victims)
    fault = drill.fault(victims, chance)
    down = victims if drill.is_down else ()
    began = time.monotonic()
    before = await asyncio.to_thread(cluster.engine_states)
    clock = TrafficClock()
    async with _watching(cluster, clock) as samples:
        sending = asyncio.create_task(send_all(cluster.url, MODEL, plan_traffic(drill.traffic, seed), clock))
        try:
            blow = await _strike(cluster, drill, fault, victims, clock, samples, chance)
            back = await _await_whole(cluster, down, clock)
            window = _felt(blow, back)
            await clock.sleep_until(window.end + (_MENDING_SECONDS if drill.loses_messages else 0.0))
            healed = await asyncio.to_thread(cluster.engine_states)
            await clock.sleep_until(max(clock.now(), drill.traffic_seconds) + _AFTER_SECONDS)
        except BaseException:
            sending.cancel()
            raise
        clock.end()
        replies = await sending
    states, processes = await _settle(cluster, drill.settle_seconds, baseline)
    verdicts = [judge(each) for each in replies]
    corruptions = new_corruptions(before, states)
    problems = [
        *([f"the fault was not felt: no {fault.trace}"] if fault.trace and fault.felt <= 0 else []),
        *objections(replies, verdicts, window, drill.excused),
        *untruths(samples, [_outage(name, drill, blow, back[name]) for name in down]),
        *leftovers(states),
        *failed_handoffs(healed, states),
        *growth(baseline, processes),
        *([f"{corruptions} KV contexts held wrong words"] if corruptions else []),
    ]
    baseline.update({name: each for name, each in processes.items() if baseline[name].pid != each.pid})
    counts = Counter(each.outcome for each in verdicts)
    return DrillRow(
        drill=drill.name,
        round=number,
        seed=seed,
        began_seconds=round(blow.begun, 2),
        felt=fault.felt,
        trace=fault.trace,
        requests=counts.total(),
        right=counts[Outcome.RIGHT],
        refused=counts[Outcome.REFUSED],
        left=counts[Outcome.LEFT],
        broken=counts[Outcome.BROKEN],
        wrong=counts[Outcome.WRONG],
        hung=counts[Outcome.HUNG],
        leaked_blocks=held_blocks(states),
        corruptions=corruptions,
        slowest_seconds=round(max(each.ended_seconds - each.sent_seconds for each in replies), 2),
        seconds=round(time.monotonic() - began, 1),
        problems=problems,
    )


async def warm_up(cluster: DrillCluster) -> dict[str, ProcessState]:
    """Some requests of each kind, so that pools have their threads; returns the processes as they are then.

    Raises:
        LaunchError: even these are not answered rightly.
    """
    replies = await send_all(cluster.url, MODEL, first_seconds(4.0, plan_traffic(TrafficShape(rate=8.0), seed=1)))
    if found := objections(replies, [judge(each) for each in replies]):
        raise LaunchError(f"the cluster does not even serve without faults: {found[0]}")
    await asyncio.sleep(_QUIET_SECONDS)
    return await asyncio.to_thread(cluster.process_states)


@dataclass(frozen=True, slots=True)
class _Blow:
    """When a fault's beginning was begun and done, and when it had been undone, by the drill's clock."""

    begun: float
    done: float
    undone: float


async def _strike(
    cluster: DrillCluster,
    drill: Drill,
    fault: Fault,
    victims: Sequence[str],
    clock: TrafficClock,
    samples: Sequence[HealthSample],
    chance: random.Random,
) -> _Blow:
    """The fault, from its beginning to its end; it is undone in any case."""
    await clock.sleep_until(chance.uniform(*_BEFORE_SECONDS))
    longer = chance.uniform(*_UNAWARE_SECONDS)
    begun = clock.now()
    try:
        await asyncio.to_thread(fault.begin, cluster)
        done = clock.now()
        if drill.notice_seconds is not None:
            await _await_notice(victims, begun, done + drill.hold_seconds - longer, clock, samples)
            await asyncio.sleep(longer)
        else:
            await clock.sleep_until(done + drill.hold_seconds)
    finally:
        await asyncio.to_thread(fault.end, cluster)
    return _Blow(begun, done, clock.now())


async def _await_notice(
    victims: Sequence[str], begun: float, until: float, clock: TrafficClock, samples: Sequence[HealthSample]
) -> None:
    """Until `/health` has called each of them unusable since the fault began, or until it is late."""
    while clock.now() < until:
        said = [each.usable for each in samples if each.at > begun and each.usable is not None]
        if all(any(not usable.get(name, True) for usable in said) for name in victims):
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def _await_whole(cluster: DrillCluster, down: Sequence[str], clock: TrafficClock) -> dict[str, float]:
    """Until every process answers and the router would use every engine; returns when each was back.

    Raises:
        LaunchError: that does not come.
    """
    back = {}
    for name in down:
        await asyncio.to_thread(cluster.await_ready, name)
        back[name] = clock.now()
    deadline = clock.now() + _WHOLE_SECONDS
    while True:
        sample = await asyncio.to_thread(cluster.health, clock.now())
        if sample.usable is not None and len(sample.usable) == len(ENGINES) and all(sample.usable.values()):
            return back
        if clock.now() > deadline:
            raise LaunchError(f"after {_WHOLE_SECONDS:g} s the router does not use every engine: {sample.usable}")
        await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def _watching(cluster: DrillCluster, clock: TrafficClock) -> AsyncIterator[list[HealthSample]]:
    """Samples of `/health` while the context is open."""
    samples: list[HealthSample] = []

    async def look() -> None:
        while True:
            samples.append(await asyncio.to_thread(cluster.health, clock.now()))
            await asyncio.sleep(_LOOK_SECONDS)

    looking = asyncio.create_task(look())
    try:
        yield samples
    finally:
        looking.cancel()


def _felt(blow: _Blow, back: Mapping[str, float]) -> Window:
    """While requests may suffer: until what was ended serves again, and a little longer."""
    return Window(blow.begun, max(blow.undone, *back.values(), 0.0) + _REACTION_SECONDS)


def _outage(name: str, drill: Drill, blow: _Blow, back: float) -> Outage:
    return Outage(
        name=name,
        begin=blow.begun,
        end=blow.undone,
        back=back,
        is_certain=drill.notice_seconds is not None,
        notice_seconds=(drill.notice_seconds or 0.0) + blow.done - blow.begun,
    )


async def _settle(
    cluster: DrillCluster, patience_seconds: float, baseline: Mapping[str, ProcessState]
) -> tuple[dict[str, EngineState], dict[str, ProcessState]]:
    """What is held, and the processes, when nothing should be held any more: as soon as that is so, or at the end."""
    deadline = time.monotonic() + patience_seconds
    states = await asyncio.to_thread(cluster.engine_states)
    while leftovers(states) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
        states = await asyncio.to_thread(cluster.engine_states)
    deadline = time.monotonic() + _QUIET_SECONDS
    processes = await asyncio.to_thread(cluster.process_states)
    while growth(baseline, processes) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
        processes = await asyncio.to_thread(cluster.process_states)
    return states, processes
