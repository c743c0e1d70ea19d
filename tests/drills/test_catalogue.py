"""The drills as a whole."""

import random

import pytest

from kvberth.drills.catalogue import DRILLS, QUICK, find
from kvberth.drills.cluster import ENGINES, LEASE_SECONDS, ROUTER


def test_names_are_unique_and_short():
    """They are typed on the command line."""
    names = [drill.name for drill in DRILLS]
    assert len(names) == len(set(names)) >= 20
    assert all(len(name) <= 20 for name in names)


def test_quick_drills_exist():
    """And do not hold for long."""
    assert sum(find(name).hold_seconds for name in QUICK) < 40


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_each_drill_makes_its_fault(drill):
    """For each of its victims, all of which exist; what must be noticed lasts long enough for that."""
    for victims in drill.victims:
        assert set(victims) <= {*ENGINES, ROUTER}
        fault = drill.fault(victims, random.Random(0))  # noqa: S311
        assert callable(fault.begin)
        assert callable(fault.end)
        assert fault.trace or drill.name == "calm"
        assert fault.felt == 0
    assert drill.is_down or drill.notice_seconds is None
    assert drill.notice_seconds is None or drill.notice_seconds < drill.hold_seconds
    assert drill.settle_seconds in {5.0, LEASE_SECONDS + 5.0}
