"""All drills that were asked for, round after round, on one cluster."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.console import Console

from kvberth.drills.cluster import DrillCluster
from kvberth.drills.helper import HelperError
from kvberth.drills.plan import Turn
from kvberth.drills.results import DrillRow
from kvberth.drills.runner import run_drill, warm_up
from kvberth.launch import LaunchError

__all__ = ["run_drills"]


async def run_drills(
    turns: Sequence[Turn],
    *,
    run_dir: Path,
    console: Console,
    on_row: Callable[[DrillRow], None],
    limit_seconds: float | None = None,
) -> int:
    """Start a cluster, do the turns one after the other, stop the cluster.

    Args:
        on_row: called as each one ends.
        limit_seconds: no drill is begun after so long.

    A cluster that is not whole again after a drill fails that drill, and the next one gets a new cluster.

    Returns:
        How many turns are left.

    Raises:
        LaunchError: a cluster does not start, or does not serve even without faults.
    """
    todo = deque(turns)
    until = None if limit_seconds is None else time.monotonic() + limit_seconds
    while todo and not _is_past(until):
        with DrillCluster(_new_folder(run_dir), todo[0].seed, console) as cluster:
            baseline = await warm_up(cluster)
            is_whole = True
            while todo and is_whole and not _is_past(until):
                turn = todo.popleft()
                row = DrillRow(drill=turn.drill.name, round=turn.round, seed=turn.seed, skipped=cluster.why_no_network)
                if not turn.drill.needs_network or cluster.why_no_network is None:
                    try:
                        row = await run_drill(cluster, turn.drill, seed=turn.seed, number=turn.round, baseline=baseline)
                    except (LaunchError, HelperError, OSError, psutil.Error) as error:
                        row = DrillRow(drill=turn.drill.name, round=turn.round, seed=turn.seed, problems=[str(error)])
                        is_whole = False
                on_row(row)
    return len(todo)


def _is_past(until: float | None) -> bool:
    return until is not None and time.monotonic() > until


def _new_folder(run_dir: Path) -> Path:
    """For the logs of one cluster, beside those of runs before."""
    return next(path for number in itertools.count(1) if not (path := run_dir / f"cluster-{number}").exists())
