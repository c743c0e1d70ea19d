"""A whole comparison, of servers that are attached and of clusters that are made up."""

import json
from contextlib import ExitStack, contextmanager

import pytest
from tests.bench import fakes
from tests.compare.conftest import settings

from kvberth.bench import TargetError
from kvberth.compare import Folder, begin, choose_trace, compare, load
from kvberth.compare import session as module
from kvberth.compare.measure import Deployment
from kvberth.launch import LaunchError


@pytest.fixture
def servers():
    """Two servers that answer, one of them slower."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(fakes.listening_in_thread(fakes.generates(seconds_before=seconds)))
            for name, seconds in (("push", 0.0), ("mine", 0.05))
        }


def attached(servers, **changes):
    urls = {name: server.url for name, server in servers.items()}
    quick = {"rates": (50.0,), "prompts": (64,), "warmup_requests": 1, "seconds": 0.01, "arrivals": "uniform"}
    return settings(**({"model": "", "emulate": False, "attach": urls} | quick | changes))


def test_attached_deployments_are_compared(servers, tmp_path):
    """The same requests to each, in each repetition; the slower one is found."""
    folder = Folder(tmp_path / "out")
    chosen = attached(servers)
    begin(chosen, folder, resume=False)
    told = []
    compare(chosen, folder, lambda progress: told.append((progress.cells_done, progress.doing)))
    comparison = load(folder)
    assert comparison.is_complete
    fast, slow = comparison.cells
    assert (fast.mode, slow.mode, fast.requests, fast.failed) == ("push", "mine", 8, 0)
    assert slow.ttft_ms.p50 > fast.ttft_ms.p50 + 30
    assert comparison.verdict.headline.startswith("This traffic wants kvberth push")
    assert told[-1] == (4, "done")
    measured = [each for each in servers["push"].bodies if len(each["prompt"]) == 64 and each["max_tokens"] == 3]
    others = [each for each in servers["mine"].bodies if len(each["prompt"]) == 64 and each["max_tokens"] == 3]
    assert sorted(map(str, measured)) == sorted(map(str, others))


def test_a_trace_is_sent_to_all_of_them(servers, tmp_path):
    """Its prompts and lengths, at two speeds, to each the same."""
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": index / 50, "prompt_tokens": 200 + index, "output_tokens": 3} for index in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice, _ = choose_trace(path, requests=4, speeds=(1.0, 2.0))
    chosen = attached(servers, trace=choice, arrivals="trace", output_tokens=None, repetitions=1)
    folder = Folder(tmp_path / "out")
    begin(chosen, folder, resume=False)
    compare(chosen, folder)
    comparison = load(folder)
    assert comparison.is_complete
    assert [cell.requests for cell in comparison.cells] == [4] * 4
    assert {cell.output_tokens for cell in comparison.cells} == {3}
    bodies = {
        name: sorted(str(each) for each in server.bodies if each["max_tokens"] == 3) for name, server in servers.items()
    }
    assert len(bodies["push"]) == 9  # eight that are measured, and one that goes before them
    assert bodies["push"] == bodies["mine"]


def test_resuming_measures_only_what_is_missing(servers, tmp_path):
    """And the figures are those of one go."""
    folder = Folder(tmp_path / "out")
    chosen = attached(servers)
    begin(chosen, folder, resume=False)

    class Stopped(KeyboardInterrupt):
        pass

    def stop(progress):
        if progress.cells_done == 3:
            raise Stopped

    with pytest.raises(Stopped):
        compare(chosen, folder, stop)
    kept = {key: (folder.path / "raw" / f"{key}.jsonl").read_bytes() for key in folder.done()}
    assert len(kept) == 3
    begin(chosen, folder, resume=True)
    compare(chosen, folder)
    assert load(folder).is_complete
    assert all((folder.path / "raw" / f"{key}.jsonl").read_bytes() == lines for key, lines in kept.items())


def test_a_deployment_that_is_not_there_costs_its_own_cells(servers, tmp_path):
    """The others are measured; what went wrong is noted."""
    folder = Folder(tmp_path / "out")
    chosen = attached(servers, repetitions=1)
    chosen.attach["gone"] = "http://127.0.0.1:9"
    begin(chosen, folder, resume=False)
    compare(chosen, folder)
    comparison = load(folder)
    assert [each.mode for each in comparison.missing] == ["gone"]
    assert {each.mode for each in comparison.cells} == {"push", "mine"}
    assert len(comparison.incidents) == 2
    assert "gone, grid, repetition 1: http://127.0.0.1:9/v1/models does not answer" in comparison.incidents[0].what


def test_a_lost_engine_is_replaced_once(tmp_path, monkeypatch):
    """What was measured with it before stays; the rest of its cells are measured with new ones."""
    folder = Folder(tmp_path / "out")
    chosen = settings(modes=("push",), repetitions=1)
    begin(chosen, folder, resume=False)
    starts = []

    @contextmanager
    def deployment(_settings, run, *_):
        starts.append(run.mode)
        yield Deployment("http://unused")

    def measure_cells(_settings, run, cells, _where, folder, on_cell):
        for cell in cells:
            if len(starts) == 1 and cell.rate == 8:
                raise LaunchError("decode-0 ended with status -9")
            file = folder.open_cell(run.key(cell))
            from tests.compare.conftest import measured

            file.finish(measured([], mode=run.mode, of=cell))
            on_cell(cell)

    monkeypatch.setattr(module, "deployment", deployment)
    monkeypatch.setattr(module, "measure_cells", measure_cells)
    compare(chosen, folder)
    assert (starts, len(folder.done())) == (["push", "push"], 2)
    (incident,) = folder.incidents()
    assert incident.what == "push, grid, repetition 1: decode-0 ended with status -9"


def test_engines_that_do_not_start_are_not_tried_for_ever(tmp_path, monkeypatch):
    """Twice; then the next mode."""
    folder = Folder(tmp_path / "out")
    chosen = settings(repetitions=1)
    begin(chosen, folder, resume=False)
    starts = []

    @contextmanager
    def deployment(_settings, run, *_):
        starts.append(run.mode)
        raise TargetError("no")
        yield

    monkeypatch.setattr(module, "deployment", deployment)
    compare(chosen, folder)
    assert starts == ["push", "push", "vllm-pull", "vllm-pull"]
    assert len(load(folder).missing) == 4
