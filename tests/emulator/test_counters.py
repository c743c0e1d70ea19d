"""Figures that cross processes by a file."""

import subprocess
import sys

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvberth.emulator.counters import COUNTERS, CounterFile, EmulatorCollector

NOTHING = dict.fromkeys(COUNTERS, 0.0)


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """A file of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = CounterFile.create()
    yield file
    file.remove()


def samples_of(collector: EmulatorCollector) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus's own parser reads in what its own client writes, by name and labels."""
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_new_file_is_all_zeros(counters):
    """In every rank's row."""
    assert counters.path.exists()
    assert [counters.read(rank) for rank in range(16)] == [NOTHING] * 16


def test_amounts_add_up(counters):
    """Each figure of each rank for itself."""
    counters.add(0, steps=1, busy_seconds=0.25)
    counters.add(0, steps=2)
    counters.add(3, steps=5, corruptions=1)
    assert counters.read(0) == {**NOTHING, "steps": 3.0, "busy_seconds": 0.25}
    assert counters.read(3) == {**NOTHING, "steps": 5.0, "corruptions": 1.0}
    assert counters.read(1) == NOTHING


def test_an_unknown_figure_is_an_error(counters):
    """Nothing is written under a wrong name."""
    with pytest.raises(KeyError, match="stepps"):
        counters.add(0, stepps=1)
    assert counters.read(0) == NOTHING


def test_two_mappings_see_the_same(counters):
    """Whatever one adds, the other reads at once, both ways."""
    rank = CounterFile(counters.path)
    rank.add(1, verified_tokens=100)
    assert counters.read(1)["verified_tokens"] == 100.0
    counters.add(2, written_tokens=7)
    assert rank.read(2)["written_tokens"] == 7.0


def test_another_process_s_figures_are_seen(counters):
    """A rank in a process of its own."""
    program = (
        "import sys; from pathlib import Path; from kvberth.emulator.counters import CounterFile; "
        "CounterFile(Path(sys.argv[1])).add(5, work_seconds=1.5)"
    )
    subprocess.run([sys.executable, "-c", program, str(counters.path)], check=True)
    assert counters.read(5) == {**NOTHING, "work_seconds": 1.5}


def test_a_removed_file_stays_mapped(counters):
    """The API server ends first: ranks that still count do not fail; and removing twice is no error."""
    rank = CounterFile(counters.path)
    counters.remove()
    counters.remove()
    assert not counters.path.exists()
    rank.add(0, steps=1)
    assert counters.read(0)["steps"] == 1.0


def test_prometheus_sees_each_rank(counters):
    """Every figure as a counter with the rank's label; rows that are not in use are not shown."""
    amounts = np.random.default_rng(0).integers(1, 2**40, (2, len(COUNTERS)))
    for rank, row in enumerate(amounts.tolist()):
        counters.add(rank, **dict(zip(COUNTERS, row, strict=True)))
    counters.add(2, steps=9)
    samples = samples_of(EmulatorCollector(counters, 2, {}))
    assert samples == {
        (f"kvberth:emulator_{name}_total", (("rank", str(rank)),)): float(amounts[rank, index])
        for index, name in enumerate(COUNTERS)
        for rank in range(2)
    }


def test_prometheus_sees_what_the_engine_is(counters):
    """A gauge that is 1, and labels that say it."""
    infos = {"kvberth:emulator_info": {"profile": 'the "small" one', "bytes_scale": "512"}, "other_info": {"role": "p"}}
    samples = samples_of(EmulatorCollector(counters, 0, infos))
    assert samples == {
        ("kvberth:emulator_info", (("bytes_scale", "512"), ("profile", 'the "small" one'))): 1.0,
        ("other_info", (("role", "p"),)): 1.0,
    }


def test_prometheus_sees_figures_as_they_are_now(counters):
    """The collector keeps nothing."""
    collector = EmulatorCollector(counters, 1, {})
    key = ("kvberth:emulator_corruptions_total", (("rank", "0"),))
    assert samples_of(collector)[key] == 0.0
    counters.add(0, corruptions=2)
    assert samples_of(collector)[key] == 2.0
