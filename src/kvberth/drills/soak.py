"""A long run: minutes of traffic at a share of what the machine can do, each with a fault, and a look between them.

Two workers and the router are spared by all that kills, so that their memory can be followed from the beginning to the
end.
"""

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from kvberth.drills.catalogue import DRILLS, Drill
from kvberth.drills.client import send_all
from kvberth.drills.cluster import MODEL, DrillCluster
from kvberth.drills.memory import MemorySample, MemoryTrend, memory_objections, memory_trends
from kvberth.drills.results import DrillRow, Report, report_of
from kvberth.drills.runner import run_drill, warm_up
from kvberth.drills.traffic import TrafficShape, plan_traffic

__all__ = ["SoakReport", "soak"]

_SHARE_OF_CAPACITY = 0.7
_LEAVING = 0.1
_TRAFFIC_SECONDS = 45.0
"""Of each minute; the rest is the fault's own time and the look at what is left."""
_SPARED = frozenset({"kill-all-prefill", "kill-all-decode", "kill-router", "restart-prefill", "restart-decode"})
_BURST_SECONDS = 4.0
_BURST_RATE = 40.0


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """The drills of a long run, and what became of the processes' memory.

    Attributes:
        rate: requests per second that were sent.
        problems: of the run as a whole; those of a minute are in its row.
    """

    seconds: float
    rate: float
    capacity: float
    drills: Report
    memory: list[MemoryTrend]
    problems: list[str]

    @property
    def has_passed(self) -> bool:
        """Whether no minute failed, and no memory grows."""
        return not self.problems and not self.drills.failed


async def soak(
    seconds: float, *, seed: int, run_dir: Path, console: Console, on_row: Callable[[list[DrillRow]], None]
) -> SoakReport:
    """Start a cluster, break it once a minute for so long, stop it.

    Args:
        on_row: called with all rows so far after each minute.

    Raises:
        LaunchError: the cluster does not start, or is not whole again after a fault.
    """
    chance = random.Random(seed)  # noqa: S311 - not a secret
    rows: list[DrillRow] = []
    samples: list[MemorySample] = []
    with DrillCluster(run_dir, seed, console) as cluster:
        baseline = await warm_up(cluster)
        capacity = await _capacity(cluster, seed)
        shape = TrafficShape(rate=_SHARE_OF_CAPACITY * capacity, leaving=_LEAVING)
        console.print(
            f"{capacity:.1f} requests per second is all it can do; {shape.rate:.1f} are sent", highlight=False
        )
        drills = [_as_minute(each, shape) for each in DRILLS if each.name not in _SPARED]
        drills = [each for each in drills if cluster.why_no_network is None or not each.needs_network]
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            number = len(rows) + 1
            row = await run_drill(
                cluster,
                chance.choice(drills),
                seed=seed + number,
                number=number,
                baseline=baseline,
            )
            rows.append(row)
            samples.append(MemorySample(time.monotonic() - began, cluster.process_states()))
            on_row(rows)
    trends = memory_trends(samples)
    return SoakReport(
        seconds=round(time.monotonic() - began, 1),
        rate=round(shape.rate, 2),
        capacity=round(capacity, 2),
        drills=report_of(rows),
        memory=trends,
        problems=memory_objections(trends),
    )


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
    replies = await send_all(cluster.url, MODEL, plan_traffic(shape, _BURST_SECONDS, seed))
    return len(replies) / max(each.ended_seconds for each in replies)
