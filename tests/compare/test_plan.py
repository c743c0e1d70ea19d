"""Which cells are measured when, and what is left of them."""

import msgspec
import pytest
from tests.compare.conftest import settings

from kvberth.compare import published, quick
from kvberth.compare.plan import Memory, groups, planned_seconds, remaining, runs
from kvberth.compare.settings import DEFAULT_MODES, TraceChoice, make
from kvberth.compare.statistics import least_requests

EMULATED = {"model": "small", "emulate": True}


def test_each_rate_with_each_prompt():
    """The grid, with as many requests as the time to send allows."""
    (grid,) = groups(settings(rates=(2.0, 1.0), prompts=(4096, 1024), seconds=10, least_requests=15))
    assert [(cell.prompt_tokens, cell.rate, cell.requests) for cell in grid.cells] == [
        (1024, 1.0, 15),
        (1024, 2.0, 20),
        (4096, 1.0, 15),
        (4096, 2.0, 20),
    ]


def test_the_order_of_modes_rotates():
    """Over as many repetitions as there are modes, each is in each place once."""
    chosen = settings(modes=("push", "pull", "colocated"), repetitions=3)
    orders = [[run.mode for run in runs(chosen) if run.repetition == repetition] for repetition in range(3)]
    assert orders[0] == ["push", "pull", "colocated"]
    assert {tuple(sorted(places)) for places in zip(*orders, strict=True)} == {("colocated", "pull", "push")}


def test_what_is_done_is_not_done_again():
    """A run that was measured in part goes on where it was."""
    (first, *_) = runs(settings())
    one, other = first.group.cells
    assert remaining(first, set()) == (one, other)
    assert remaining(first, {first.key(one)}) == (other,)
    assert remaining(first, {first.key(one), first.key(other)}) == ()


def test_cells_about_memory_are_measured_together():
    """Fresh memory is there once, and what fragments it comes before the last cells."""
    caching = next(run for run in runs(settings(extra=True)) if run.group.name == "prefix-caching")
    cells = caching.group.cells
    assert [(cell.memory, cell.shared_tokens > 0) for cell in cells] == [
        (Memory.FRESH, False),
        (Memory.FRESH, True),
        (Memory.FRAGMENTED, False),
        (Memory.FRAGMENTED, True),
    ]
    assert remaining(caching, {caching.key(cells[0])}) == cells
    assert remaining(caching, {caching.key(cell) for cell in cells}) == ()


def test_keys_are_unique():
    """No two cells of the published grid write to one file."""
    chosen = make(EMULATED | published())
    keys = [run.key(cell) for run in runs(chosen) for cell in run.cells]
    assert len(keys) == len(set(keys))


def test_traffic_is_the_same_for_all_modes_and_another_per_cell_and_repetition():
    """The seed depends on where a request is measured, and not on the mode."""
    (grid,) = groups(settings())
    seeds = {cell.traffic_seed(1, repetition) for cell in grid.cells for repetition in range(2)}
    assert len(seeds) == 4
    assert grid.cells[0].traffic_seed(1, 0) != grid.cells[0].traffic_seed(2, 0)


def test_quick_is_planned_under_ten_minutes():
    """On the profile that it is meant for."""
    chosen = make(EMULATED | quick())
    assert sum(planned_seconds(chosen, run, run.cells) for run in runs(chosen)) < 600
    assert chosen.modes == DEFAULT_MODES


def test_the_published_grid_is_planned_under_75_minutes():
    """And has the p95 of the heaviest cells, which a target needs."""
    chosen = make(EMULATED | published())
    assert sum(planned_seconds(chosen, run, run.cells) for run in runs(chosen)) < 4500
    assert chosen.repetitions >= 3
    heavy = [cell for group in groups(chosen) for cell in group.cells if cell.rate == 8]
    assert min(cell.requests for cell in heavy) >= least_requests(95)


def test_a_cluster_that_runs_already_is_not_planned_again():
    """Nor is one for cells that have been measured."""
    chosen = settings()
    (run, *_) = runs(chosen)
    whole = planned_seconds(chosen, run, run.cells)
    assert planned_seconds(chosen, run, run.cells, has_started=True) == whole - 8
    assert planned_seconds(chosen, run, ()) == 0


def test_the_published_grid():
    """Rates 1, 2, 4, 8 by 1k, 4k, 16k; all modes; four cells about caches and memory; chunks; decode alone."""
    chosen = make(EMULATED | published())
    grid, alone, chunks, caching = groups(chosen)
    assert {(cell.rate, cell.prompt_tokens) for cell in grid.cells} == {
        (rate, prompt) for rate in (1, 2, 4, 8) for prompt in (1024, 4096, 16384)
    }
    assert {cell.output_tokens for cell in grid.cells} == {128}
    assert grid.modes == (*DEFAULT_MODES, "vllm-pull-inline", "vllm-push-inline")
    assert all(len(grid.cells_of(mode)) == 12 for mode in DEFAULT_MODES)
    assert [cell.name for cell in grid.cells_of("vllm-pull-inline")] == ["16384@4", "16384@8"]
    assert (len(caching.cells), caching.prefix_caching) == (4, True)
    assert set(caching.modes) == {"push", "pull", "vllm-pull", "vllm-push"}
    assert chunks.engine_args == ("--max-num-batched-tokens", "4096")
    assert set(chunks.modes) == {"push", "vllm-pull", "vllm-push"}
    assert alone.modes == ("decode-only",)


TRACE = TraceChoice(file="/traces/calls.jsonl", sha256="", requests=40, rate=2.5, speeds=(2.0, 1.0))


def test_a_trace_at_its_own_times_has_a_cell_per_speed():
    """Each on a cluster of its own: what it has left in prefix caches is no gift to the next."""
    chosen = settings(trace=TRACE, arrivals="trace", output_tokens=None)
    (group,) = groups(chosen)
    assert [(cell.name, cell.rate, cell.speed, cell.requests) for cell in group.cells] == [
        ("trace@2.5", 2.5, 1.0, 40),
        ("trace@5", 5.0, 2.0, 40),
    ]
    assert group.prefix_caching
    planned = runs(chosen)
    assert [len(run.cells) for run in planned] == [1] * 8
    assert len({run.name for run in planned}) == 8


def test_a_trace_at_other_times_has_a_cell_per_rate():
    """As the grid has."""
    (group,) = groups(settings(trace=TRACE, arrivals="poisson", rates=(4.0, 1.0)))
    assert [(cell.name, cell.speed) for cell in group.cells] == [("trace@1", None), ("trace@4", None)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), ({"turns": 2}, True), ({"prefix_share": 0.5}, True), ({"turns": 2, "prefix_caching": False}, False)],
)
def test_prefixes_are_kept_where_they_come_again(changes, expected):
    """Unless the user says otherwise."""
    (group,) = groups(settings(**changes))
    assert group.prefix_caching is expected


def test_attached_deployments_are_the_modes():
    """By the names that the user gave them."""
    (grid,) = groups(settings(model="", emulate=False, attach={"mine": "http://h:1", "push": "http://h:2"}))
    assert grid.modes == ("mine", "push")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"modes": ("pusch",)}, "modes: 'pusch' is none; known are push"),
        ({"modes": ("push", "push")}, "modes: each one once"),
        ({"rates": ()}, "rates: at least one"),
        ({"rates": (0.0,)}, "rates: must be above 0"),
        ({"prompts": (0,)}, "prompts: must be 1 token or more"),
        ({"repetitions": 0}, "repetitions: must be 1 or more"),
        ({"output_tokens": 1}, "output_tokens: must be 2 or more"),
        ({"arrivals": "trace"}, "arrivals: must be poisson or uniform, not trace"),
        ({"output_tokens": None}, "output_tokens: must be given"),
        ({"trace": TRACE, "prefix_share": 0.5}, "prefix_share: a trace has beginnings of its own"),
        (
            {"trace": msgspec.structs.replace(TRACE, rate=None), "arrivals": "trace"},
            "arrivals: /traces/calls.jsonl has no times to go by",
        ),
        ({"trace": msgspec.structs.replace(TRACE, speeds=())}, "speed: at least one"),
        ({"extra": True, "turns": 2}, "extra: these cells have random prompts"),
        ({"cancel_share": 1.0}, "cancel_share: must be 0 or more and below 1"),
        ({"seconds": 0.0}, "seconds: must be above 0"),
        ({"price_per_gpu_hour": -1.0}, "price_per_gpu_hour: must be 0 or more"),
        ({"emulate": False}, "modes: vllm-pull is for emulated engines"),
        ({"model": ""}, "model: give a model"),
        ({"attach": {"a/b": "http://h"}, "model": ""}, "attach: 'a/b' is no name for a mode"),
        ({"attach": {"a": "http://h"}}, "attach: running deployments have their models"),
        ({"attach": {"a": "http://h"}, "model": "", "extra": True}, "extra: these cells need engines"),
    ],
)
def test_settings_that_make_no_sense(changes, says):
    """Each is refused with its name and what would be right."""
    with pytest.raises(ValueError, match=f"^{says}"):
        settings(**changes)


def test_settings_from_plain_values_are_checked_alike():
    """The class's own words, without msgspec's around them."""
    with pytest.raises(ValueError, match=r"^repetitions: must be 1 or more, not 0$"):
        make(EMULATED | {"repetitions": 0})
