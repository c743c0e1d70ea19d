"""Drills in their rounds, on clusters that are not there."""

import asyncio

import pytest
from rich.console import Console

from kvberth.drills import rounds
from kvberth.drills.catalogue import Drill
from kvberth.drills.faults import Nothing
from kvberth.drills.results import DrillRow
from kvberth.launch import LaunchError


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
        if drill.name == "breaks":
            raise LaunchError("decode-0 is not ready")
        return DrillRow(drill=drill.name, round=number, seed=seed, requests=1, right=1)

    async def warm_up(_):
        return {}

    monkeypatch.setattr(rounds, "DrillCluster", Cluster)
    monkeypatch.setattr(rounds, "run_drill", run_drill)
    monkeypatch.setattr(rounds, "warm_up", warm_up)
    return calls


def run(tmp_path, *drills, count=1):
    seen = []
    report = asyncio.run(
        rounds.run_drills(
            drills,
            rounds=count,
            seed=5,
            run_dir=tmp_path,
            console=Console(quiet=True),
            on_row=lambda rows: seen.append(rows[-1].drill),
        )
    )
    assert seen == [row.drill for row in report.rows]
    return report


def test_each_round_has_its_seed(done, tmp_path):
    """All on one cluster."""
    run(tmp_path, drill("one"), drill("two"), count=2)
    assert done == [(1, "one", 1, 5), (1, "two", 1, 5), (1, "one", 2, 6), (1, "two", 2, 6)]


def test_a_cluster_in_pieces_fails_the_drill_and_is_replaced(done, tmp_path):
    """The others are done all the same."""
    report = run(tmp_path, drill("breaks"), drill("one"))
    assert done == [(1, "breaks", 1, 5), (2, "one", 1, 5)]
    assert (report.drills, report.failed) == (2, 1)
    assert report.rows[0].problems == ["decode-0 is not ready"]


def test_drills_that_need_a_network_are_skipped_without_one(done, tmp_path):
    """With the reason, and counted as skipped."""
    report = run(tmp_path, drill("cut", needs_network=True), drill("one"))
    assert [name for _, name, _, _ in done] == ["one"]
    assert (report.drills, report.skipped, report.rows[0].skipped) == (1, 1, "needs root")
