"""Drills in their rounds, on clusters that are not there."""

import asyncio

import pytest
from rich.console import Console

from kvberth.drills import rounds
from kvberth.drills.catalogue import Drill
from kvberth.drills.faults import Nothing
from kvberth.drills.plan import plan_turns
from kvberth.drills.results import DrillRow
from kvberth.launch import LaunchError

errors: dict[str, Exception] = {}
"""What drills of these names end with, in place of a row."""


def drill(name: str, *, needs_network: bool = False) -> Drill:
    return Drill(name=name, what="a test", fault=lambda _, __: Nothing(), needs_network=needs_network)


@pytest.fixture
def done(monkeypatch):
    """What was done: (cluster, drill, round, seed); a drill called `breaks` leaves its cluster in pieces."""
    calls = []

    class Cluster:
        count = 0
        why_no_network = "needs root"

        def __init__(self, *_):
            Cluster.count += 1
            self.number = Cluster.count

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    async def run_drill(cluster, drill, *, seed, number, baseline):
        calls.append((cluster.number, drill.name, number, seed))
        if drill.name in errors:
            raise errors[drill.name]
        return DrillRow(drill=drill.name, round=number, seed=seed, requests=1, right=1)

    async def warm_up(_):
        return {}

    monkeypatch.setattr(rounds, "DrillCluster", Cluster)
    monkeypatch.setattr(rounds, "run_drill", run_drill)
    monkeypatch.setattr(rounds, "warm_up", warm_up)
    return calls


def run(tmp_path, *drills, count=1, **limits):
    """The rows, and how many are left."""
    rows: list[DrillRow] = []
    turns = plan_turns(drills, count, 5)
    left = asyncio.run(
        rounds.run_drills(turns, run_dir=tmp_path, console=Console(quiet=True), on_row=rows.append, **limits)
    )
    return rows, left


def test_each_round_has_its_seed(done, tmp_path):
    """All on one cluster."""
    _, left = run(tmp_path, drill("one"), drill("two"), count=2)
    assert done == [(1, "one", 1, 5), (1, "two", 1, 5), (1, "one", 2, 6), (1, "two", 2, 6)]
    assert left == 0


@pytest.mark.parametrize("error", [LaunchError("decode-0 is not ready"), OSError("no such device")])
def test_a_cluster_in_pieces_fails_the_drill_and_is_replaced(done, tmp_path, error):
    """The others are done all the same."""
    errors["breaks"] = error
    rows, _ = run(tmp_path, drill("breaks"), drill("one"))
    assert done == [(1, "breaks", 1, 5), (2, "one", 1, 5)]
    assert [row.problems for row in rows] == [[str(error)], []]


def test_drills_that_need_a_network_are_skipped_without_one(done, tmp_path):
    """With the reason, and counted as skipped."""
    rows, _ = run(tmp_path, drill("cut", needs_network=True), drill("one"))
    assert [name for _, name, _, _ in done] == ["one"]
    assert [row.skipped for row in rows] == ["needs root", None]


def test_when_its_time_is_up_what_is_left_is_left(done, tmp_path):
    """No cluster is started for nothing."""
    rows, left = run(tmp_path, drill("one"), count=3, limit_seconds=-1.0)
    assert (rows, left, done) == ([], 3, [])


def test_logs_of_an_earlier_run_stay(tmp_path):
    """A run that goes on may have the same folder."""
    (tmp_path / "cluster-1").mkdir()
    assert rounds._new_folder(tmp_path) == tmp_path / "cluster-2"
