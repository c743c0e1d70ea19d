"""A long run: minutes of traffic at a share of what the machine can do, each with a fault, and a look between them.

Two workers and the router are spared by all that kills, so that their memory can be followed from the beginning to the
end.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from rich.console import Console

from kvberth.drills.catalogue import DRILLS, Drill
from kvberth.drills.client import send_all
from kvberth.drills.cluster import DECODE, MODEL, PREFILL, ROUTER, DrillCluster
from kvberth.drills.helper import HelperError
from kvberth.drills.memory import MemorySample, memory_objections, memory_trends
from kvberth.drills.results import DrillRow, report_of
from kvberth.drills.runner import run_drill, warm_up
from kvberth.drills.soak_report import SoakReport
from kvberth.drills.traffic import TrafficShape, first_seconds, plan_traffic
from kvberth.launch import LaunchError

__all__ = ["soak"]

_SHARE_OF_CAPACITY = 0.7
_LEAVING = 0.1
_TRAFFIC_SECONDS = 45.0
"""Of each minute; the rest is the fault's own time and the look at what is left."""
_SPARED = frozenset({"kill-all-prefill", "kill-all-decode", "kill-router", "restart-prefill", "restart-decode"})
_FOLLOWED_SECONDS = 900.0
"""A run of this length can say of every process that is spared whether its memory grows."""
_BURST_SECONDS = 4.0
_BURST_RATE = 40.0


async def soak(
    seconds: float, *, seed: int, run_dir: Path, console: Console, on_row: Callable[[DrillRow], None]
) -> SoakReport:
    """Start a cluster, break it once a minute for so long, stop it.

    Args:
        on_row: called after each minute.

    A cluster that is not whole again after a fault ends the run.

    Raises:
        LaunchError: the cluster does not start.
    """
    chance = random.Random(seed)  # noqa: S311 - not a secret
    rows: list[DrillRow] = []
    with DrillCluster(run_dir, seed, console) as cluster:
        baseline = await warm_up(cluster)
        capacity = await _capacity(cluster, seed)
        shape = TrafficShape(rate=_SHARE_OF_CAPACITY * capacity, leaving=_LEAVING)
        console.print(
            f"{capacity:.1f} requests per second is all it can do; {shape.rate:.1f} are sent", highlight=False
        )
        minutes = _minutes(cluster, shape, chance)
        began = time.monotonic()
        samples = [MemorySample(0.0, cluster.process_states())]
        is_whole = True
        while is_whole and time.monotonic() - began < seconds:
            drill, number = next(minutes), len(rows) + 1
            try:
                row = await run_drill(cluster, drill, seed=seed + number, number=number, baseline=baseline)
            except (LaunchError, HelperError, OSError, psutil.Error) as error:
                row = DrillRow(drill=drill.name, round=number, seed=seed + number, problems=[str(error)])
                is_whole = False
            rows.append(row)
            samples.append(MemorySample(time.monotonic() - began, cluster.process_states()))
            on_row(row)
    trends = memory_trends(samples)
    unknown = {PREFILL[0], DECODE[0], ROUTER} - {each.name for each in trends}
    return SoakReport(
        seconds=round(time.monotonic() - began, 1),
        rate=round(shape.rate, 2),
        capacity=round(capacity, 2),
        leaving=_LEAVING,
        drills=report_of(rows),
        memory=trends,
        problems=[
            *memory_objections(trends),
            *(f"the memory of {name} was not followed" for name in sorted(unknown) if seconds >= _FOLLOWED_SECONDS),
        ],
    )


def _minutes(cluster: DrillCluster, shape: TrafficShape, chance: random.Random) -> Iterator[Drill]:
    """Each drill once, in any order, and again."""
    drills = [each for each in DRILLS if each.name not in _SPARED]
    deck = [_as_minute(each, shape) for each in drills if cluster.why_no_network is None or not each.needs_network]
    while True:
        chance.shuffle(deck)
        yield from deck


def _as_minute(drill: Drill, shape: TrafficShape) -> Drill:
    """With the long run's traffic; of several victims it hits the last, so that the first lives on."""
    leaving = max(shape.leaving, drill.traffic.leaving)
    return dataclasses.replace(
        drill,
        victims=drill.victims[-1:],
        traffic=dataclasses.replace(shape, leaving=leaving),
        traffic_seconds=_TRAFFIC_SECONDS,
    )


async def _capacity(cluster: DrillCluster, seed: int) -> float:
    """Requests per second that are answered when far too many are sent."""
    shape = TrafficShape(rate=_BURST_RATE, deadline_seconds=120.0)
    replies = await send_all(cluster.url, MODEL, list(first_seconds(_BURST_SECONDS, plan_traffic(shape, seed))))
    return len(replies) / max(each.ended_seconds for each in replies)
