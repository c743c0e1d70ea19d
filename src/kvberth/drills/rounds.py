"""All drills that were asked for, round after round, on one cluster."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kvberth.drills.catalogue import Drill
from kvberth.drills.cluster import DrillCluster
from kvberth.drills.results import DrillRow, Report, report_of
from kvberth.drills.runner import run_drill, warm_up

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

    Raises:
        LaunchError: the cluster does not start, or is not whole again after a drill.
    """
    rows: list[DrillRow] = []
    with DrillCluster(run_dir, seed, console) as cluster:
        baseline = await warm_up(cluster)
        for number in range(1, rounds + 1):
            for drill in drills:
                ours = seed + number - 1
                if drill.needs_network and cluster.why_no_network is not None:
                    rows.append(DrillRow(drill=drill.name, round=number, seed=ours, skipped=cluster.why_no_network))
                else:
                    rows.append(await run_drill(cluster, drill, seed=ours, number=number, baseline=baseline))
                on_row(rows)
    return report_of(rows)
