"""The idle share, from counters that are known."""

import pytest

from kvberth.bench import machine, versions
from kvberth.bench.machine import IdleMeter


def meter_of(*samples):
    meter = IdleMeter(iter(samples).__next__)
    for _ in samples:
        meter.sample()
    return meter


def test_idle_share_is_that_of_the_window():
    """What was before the first sample does not count."""
    assert meter_of((100.0, 1000.0), (101.0, 1004.0), (103.0, 1008.0)).idle_share == 0.375


@pytest.mark.parametrize("samples", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 2.0)]])
def test_no_time_no_share(samples):
    """Not measured is not zero."""
    assert meter_of(*samples).idle_share is None


def test_counters_that_step_back():
    """The kernel's idle time is not quite monotonic; a share stays one."""
    assert meter_of((10.0, 20.0), (9.99, 21.0)).idle_share == 0.0


def test_this_machine_is_read():
    """Idle time is part of all time."""
    meter = IdleMeter()
    meter.sample()
    assert meter.idle_share is None or 0 <= meter.idle_share <= 1
    assert machine()["cpus"] >= 1
    assert versions()["kvberth"] is not None
