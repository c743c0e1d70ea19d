"""All drills that were asked for, round after round, on one cluster."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvberth.drills.catalogue import Drill
from kvberth.drills.cluster import DrillCluster
from kvberth.drills.results import DrillRow, Report, report_of
from kvberth.drills.runner import run_drill, warm_up
from kvberth.launch import LaunchError

__all__ = ["run_drills"]


async def run_drills(
    drills: Sequence[Drill],
    *,
    rounds: int,
    seed: int,
    run_dir: Path,
    console: Console,
    on_row: Callable[[list[DrillRow]], None],
) -> Report:
    """Start a cluster, do each drill once per round, stop the cluster.

    Args:
        seed: of the first round; each row says its own, with which it can be done again alone.
        on_row: called with all rows so far when one has been added.

    A cluster that is not whole again after a drill fails that drill, and the next one gets a new cluster.

    Raises:
        LaunchError: a cluster does not start, or does not serve even without faults.
    """
    rows: list[DrillRow] = []
    todo = deque((number, drill) for number in range(1, rounds + 1) for drill in drills)
    clusters = itertools.count(1)
    while todo:
        with DrillCluster(run_dir / f"cluster-{next(clusters)}", seed, console) as cluster:
            baseline = await warm_up(cluster)
            while todo:
                number, drill = todo.popleft()
                its_seed = seed + number - 1
                is_whole = True
                if drill.needs_network and cluster.why_no_network is not None:
                    row = DrillRow(drill=drill.name, round=number, seed=its_seed, skipped=cluster.why_no_network)
                else:
                    try:
                        row = await run_drill(cluster, drill, seed=its_seed, number=number, baseline=baseline)
                    except LaunchError as error:
                        row = DrillRow(drill=drill.name, round=number, seed=its_seed, problems=[str(error)])
                        is_whole = False
                rows.append(row)
                on_row(rows)
                if not is_whole:
                    break
    return report_of(rows)
