"""What the benchmark of the first-token gap measures, and makes of it."""

import json

import pytest
from tests.compare.conftest import fill, manifest

pytest.importorskip("matplotlib", reason="the map needs it")

from benchmarks import gap
from kvberth.bench import read_trace
from kvberth.compare import Folder, load
from kvberth.compare.plan import groups, planned_seconds, runs
from kvberth.emulator import load_profile


def test_each_part_is_a_comparison_of_three_modes(tmp_path):
    """Ours, vLLM's pull, vLLM's push; short enough for a quarter of an hour."""
    parts = gap.parts_of(tmp_path)
    for name, settings in parts.items():
        assert len(settings.modes) == 3, name
        assert sum(planned_seconds(settings, run, run.cells) for run in runs(settings)) < 900, name


def test_one_factor_differs_from_the_base(tmp_path):
    """Layers, link, hits, arrivals: each by itself."""
    parts = gap.parts_of(tmp_path)
    changed = {name: set(settings.differences(parts["poisson"])) for name, settings in parts.items()}
    assert changed["base"] == {"rates", "arrivals"}
    assert changed["threads"] == {"rates", "arrivals", "modes"}
    assert changed["layers-16"] == {"model", "arrivals"}
    assert changed["link-400"] == {"model", "rates", "emulate_link", "arrivals"}
    assert changed["hits-50"] == {"prefix_share", "arrivals"}
    assert changed["bursts-4"] == {"trace", "arrivals", "prefix_caching"}


def test_profiles_are_the_shipped_one_but_for_their_factor(tmp_path):
    """Layers change nothing about the time of a step, and the link nothing but its bandwidth."""
    parts, base = gap.parts_of(tmp_path), load_profile(gap.PROFILE)
    layers, link = load_profile(parts["layers-16"].model), load_profile(parts["link-400"].model)
    assert (layers.model.layers, layers.timing, layers.link) == (16, base.timing, base.link)
    assert (link.link.bandwidth_gbps, link.timing, link.model) == (400.0, base.timing, base.model)


def test_bursts_come_at_once_and_at_the_base_rate(tmp_path):
    """Four in the time of four, all at its beginning."""
    path = gap.write_bursts(tmp_path, 4)
    times = [row.seconds for row in read_trace(path, requests=1000).rows]
    assert len(times) == gap.burst_requests(4) == 60
    assert times[:5] == [0.0] * 4 + [pytest.approx(4 / gap.BASE_RATE, abs=1e-6)]
    (group,) = groups(gap.parts_of(tmp_path)["bursts-4"])
    assert group.cells[0].rate == pytest.approx(gap.BASE_RATE, rel=0.1)


def test_the_axes_of_the_map(tmp_path):
    """By the profile: 115 ms for a prompt, of 4.3 GB of KV."""
    assert gap.utilisation(8) == pytest.approx(0.92, abs=0.03)
    assert gap.link_ms(400) == pytest.approx(86, abs=1)


def test_what_is_made_of_the_parts(tmp_path, capsys):
    """vLLM's pull takes twice as long at 8/s, and only there; parts that are not there are no error."""
    parts = gap.parts_of(tmp_path)
    for name in ("base", "link-400"):
        folder = Folder(tmp_path / name)
        folder.create(manifest(parts[name]))
        fill(folder, parts[name])
    points = list(gap.points_of("base", parts["base"], load(Folder(tmp_path / "base"))))
    assert [point.rate for point in points] == list(gap.RATES)
    assert [round(point.over_ours[0], 1) for point in points] == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert all(low <= value <= high for value, low, high in (point.over_ours for point in points))
    gap.report(tmp_path, parts)
    text = (tmp_path / "gap.md").read_text()
    assert text.count("| link-400 ") == 5
    assert "hits-50" not in text
    assert "<svg" in (tmp_path / "gap.svg").read_text()


def test_the_manifest_of_a_part_can_be_read(tmp_path):
    """Settings survive the disk, the trace's among them."""
    parts = gap.parts_of(tmp_path)
    folder = Folder(tmp_path / "bursts-2")
    folder.create(manifest(parts["bursts-2"]))
    assert folder.manifest().settings == parts["bursts-2"]
    assert json.loads((folder.path / "compare.json").read_bytes())["settings"]["trace"]["requests"] == 60
