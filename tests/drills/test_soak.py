"""A long run, on a cluster that is not there, and the page about it."""

import asyncio
import importlib
import random
from itertools import islice

import pytest
from rich.console import Console

from kvberth.drills.catalogue import DRILLS
from kvberth.drills.cluster import DECODE, PREFILL, ROUTER
from kvberth.drills.memory import MemoryTrend, Slope
from kvberth.drills.results import DrillRow, report_of
from kvberth.drills.soak_report import SoakReport, soak_page
from kvberth.drills.states import ProcessState
from kvberth.drills.traffic import TrafficShape
from kvberth.launch import LaunchError

module = importlib.import_module("kvberth.drills.soak")  # the package has a function of that name


class Cluster:
    why_no_network = None

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def process_states(self):
        return {name: ProcessState(1, 1, 1, 1 << 30) for name in (*PREFILL, *DECODE, ROUTER)}


@pytest.fixture
def ends_with(monkeypatch):
    """What the third minute ends with, in place of a row."""
    error = LaunchError("decode-1 is not ready")

    async def run_drill(cluster, drill, *, seed, number, baseline):
        if number == 3:
            raise error
        return DrillRow(drill=drill.name, round=number, seed=seed, requests=1, right=1)

    async def warm_up(_):
        return {}

    async def capacity(*_):
        return 10.0

    monkeypatch.setattr(module, "DrillCluster", Cluster)
    monkeypatch.setattr(module, "run_drill", run_drill)
    monkeypatch.setattr(module, "warm_up", warm_up)
    monkeypatch.setattr(module, "_capacity", capacity)
    return error


def test_a_cluster_in_pieces_ends_the_run_with_a_report(ends_with, tmp_path):
    """An hour's figures are not lost with its last minute."""
    rows = []
    report = asyncio.run(module.soak(3600.0, seed=1, run_dir=tmp_path, console=Console(quiet=True), on_row=rows.append))
    assert [row.problems for row in rows] == [[], [], ["decode-1 is not ready"]]
    assert report.drills.rows == rows
    assert (report.rate, report.capacity, report.leaving) == (7.0, 10.0, 0.1)
    assert not report.has_passed
    assert report.problems == [
        f"the memory of {name} was not followed" for name in sorted(["prefill-0", "decode-0", "router"])
    ]


def test_each_drill_has_its_minute_before_one_comes_again():
    """With the traffic of the run, at the victims that are not spared."""
    endless = module._minutes(Cluster(), TrafficShape(rate=3.0), random.Random(0))  # noqa: S311
    minutes = list(islice(endless, 2 * len(DRILLS)))
    count = len(DRILLS) - len(module._SPARED)
    assert len({each.name for each in minutes[:count]}) == count
    assert {each.name for each in minutes[:count]} == {each.name for each in minutes[count : 2 * count]}
    for each in minutes:
        assert each.traffic.rate == 3.0
        assert each.traffic_seconds >= 45
        assert each.victims in [((),), ((PREFILL[1],),), ((DECODE[1],),), ((ROUTER,),)]


SLOPE = Slope(samples=45, bytes_per_hour=1e6, error_bytes_per_hour=5e5)
PARTS = [Slope(samples=15, bytes_per_hour=per_hour, error_bytes_per_hour=5e5) for per_hour in (3e6, 0.0, 0.0)]
TREND = MemoryTrend(name="router", hours=0.75, mean_bytes=8e7, slope=SLOPE, parts=PARTS)
SHORT = MemoryTrend(name="decode-1", hours=0.1, mean_bytes=1e9, slope=SLOPE, parts=[])


def test_the_page_has_it_all():
    """What was sent, what became of it, memory, drills, and what was wrong."""
    rows = [
        DrillRow(drill="far", round=1, seed=0, felt=900, trace="packets", requests=10, right=9, left=1),
        DrillRow(drill="calm", round=2, seed=1, requests=10, right=9, hung=1, problems=["request 3 hung: x"]),
    ]
    page = soak_page(
        SoakReport(
            seconds=3600,
            rate=7.0,
            capacity=10.0,
            leaving=0.1,
            drills=report_of(rows),
            memory=[TREND, SHORT],
            problems=["router grows"],
        )
    )
    assert page.startswith("60 minutes, 7.0 requests per second (70% of what the machine can do), of which 10% were")
    assert "Of 20 requests 18 were right, 1 left, 0 refused, 0 broken, 0 wrong and 1 hung" in page
    assert "| router | 45 | 45 | 80 MB | +1.0 MB (-0.0 to +2.0) | +3.0, +0.0, +0.0 | no |" in page
    assert "| decode-1 | 6 | 45 | 1000 MB | +1.0 MB (-0.0 to +2.0) | - | not judged |" in page
    assert "| far | 1 | 900 packets | 10 |" in page
    assert page.endswith("* router grows\n* minute 2, calm: request 3 hung: x\n")
