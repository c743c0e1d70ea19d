"""Growth is told from noise."""

import numpy as np
import pytest

from kvberth.drills.memory import MemorySample, memory_objections, memory_trends
from kvberth.drills.states import ProcessState

MB = 1_000_000


def samples(
    per_hour_bytes: float,
    *,
    noise_bytes: float = MB,
    count: int = 60,
    pid: int = 7,
    every: float = 60.0,
    size_bytes: float = 1200 * MB,
    arena_bytes: int = 1,
    step_bytes: float = 0.0,
) -> list[MemorySample]:
    """Of a process that takes memory in arenas, and takes one step in the middle."""
    noise = np.random.default_rng(0).normal(0, noise_bytes, count)
    grown = [per_hour_bytes * every * number / 3600 // arena_bytes * arena_bytes for number in range(count)]
    steps = [step_bytes * (number > count * 0.6) for number in range(count)]
    return [
        MemorySample(
            every * number, {"router": _process(size_bytes + grown[number] + steps[number] + noise[number], pid)}
        )
        for number in range(count)
    ]


def _process(rss: float, pid: int) -> ProcessState:
    return ProcessState(pid=pid, threads=1, files=1, rss_bytes=int(rss))


@pytest.mark.parametrize(("growth", "is_found"), [(0, False), (10 * MB, False), (100 * MB, True), (-100 * MB, False)])
def test_growth_is_found(growth, is_found):
    """24 MB per hour are tolerated."""
    (trend,) = memory_trends(samples(growth))
    assert trend.slope.bytes_per_hour == pytest.approx(growth, abs=3 * MB)
    assert trend.is_growing is is_found
    assert bool(memory_objections([trend])) is is_found


def test_noise_is_no_growth():
    """What may be chance is not held against it, and few samples may be chance more easily."""
    (trend,) = memory_trends(samples(0, noise_bytes=200 * MB, count=12, every=120.0))
    assert not trend.is_growing
    low, high = trend.slope.interval
    assert low < 0 < high
    assert high - low > 4 * trend.slope.error_bytes_per_hour


def test_a_step_is_no_growth():
    """A pool that is filled once as never before is at its size from then on, though a line through it goes up."""
    (trend,) = memory_trends(samples(0, noise_bytes=MB / 10, step_bytes=50 * MB))
    assert trend.slope.interval[0] > 24 * MB
    assert not trend.is_growing


def test_growth_in_steps_is_found():
    """Python takes memory by the MiB: 40 MB per hour are a step each minute and a half."""
    for size in (80 * MB, 1200 * MB):
        (trend,) = memory_trends(samples(40 * MB, noise_bytes=MB / 10, size_bytes=size, arena_bytes=2**20, count=40))
        assert trend.is_growing


@pytest.mark.parametrize(("growth", "is_found"), [(4 * MB, False), (20 * MB, True)])
def test_of_a_small_process_less_is_tolerated(growth, is_found):
    """8 MB per hour, whatever its size."""
    (trend,) = memory_trends(samples(growth, noise_bytes=MB / 10, size_bytes=80 * MB))
    assert trend.is_growing is is_found


def test_the_beginning_does_not_count():
    """Pools fill."""
    early = [MemorySample(each.at - 600.0, {"router": _process(500 * MB, 7)}) for each in samples(0, count=10)]
    (trend,) = memory_trends([*early, *samples(0)])
    assert not trend.is_growing
    assert trend.slope.samples < 60


def test_what_was_followed_for_minutes_is_not_judged():
    """It is still shown, with all that was read."""
    (trend,) = memory_trends(samples(100 * MB, count=15))
    assert trend.slope.bytes_per_hour > 50 * MB
    assert not trend.is_judged
    assert not trend.is_growing
    assert [at for at, _ in trend.used] == [minute * 60.0 for minute in range(15)]


def test_a_new_start_is_another_process():
    """And one that was hardly seen is none."""
    trends = memory_trends([*samples(0, pid=7), *samples(0, pid=8), *samples(0, pid=9, count=4)])
    assert [trend.name for trend in trends] == ["router", "router"]


def test_objection_names_the_process():
    """With the slope."""
    (line,) = memory_objections(memory_trends(samples(100 * MB, noise_bytes=0.0)))
    assert line == "router grows by 100.0 MB per hour (100.0 to 100.0)"
