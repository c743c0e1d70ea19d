"""`kvberth faults`: which drills it does, what it writes, how it ends."""

import json

import pytest

import kvberth.drills
from kvberth.drills import DRILLS, QUICK, DrillRow, SoakReport, report_of
from kvberth.launch import LaunchError


@pytest.fixture
def rounds(monkeypatch):
    """In place of `run_drills`: what it was called with, and which of the drills fail."""

    class Rounds:
        def __init__(self):
            self.failing, self.error = set(), None

        async def __call__(self, drills, *, on_row, **arguments):
            self.names, self.arguments = [each.name for each in drills], arguments
            if self.error is not None:
                raise self.error
            rows = []
            for drill in drills:
                problems = ["it broke"] if drill.name in self.failing else []
                rows.append(DrillRow(drill=drill.name, round=1, seed=0, requests=3, right=3, problems=problems))
                on_row(rows)
            return report_of(rows)

    fake = Rounds()
    monkeypatch.setattr(kvberth.drills, "run_drills", fake)
    return fake


def test_all_drills_by_default(kvberth_command, rounds):
    """Once each; passed is status 0."""
    done = kvberth_command("faults")
    assert done.exit_code == 0
    assert rounds.names == [drill.name for drill in DRILLS]
    assert rounds.arguments["rounds"] == 1
    assert f"{len(DRILLS)} drills, 0 failed, 0 skipped; {3 * len(DRILLS)} requests" in done.stdout


def test_flags_choose_the_drills(kvberth_command, rounds, tmp_path):
    """Quick, or by name; rounds, seed and logs reach the runner."""
    kvberth_command("faults", "--quick")
    assert rounds.names == list(QUICK)
    kvberth_command(
        "faults", "--drill", "kill-decode", "--drill", "calm", "--repeat", 3, "--seed", 7, "--run-dir", tmp_path
    )
    assert rounds.names == ["kill-decode", "calm"]
    assert rounds.arguments["rounds"] == 3
    assert rounds.arguments["seed"] == 7
    assert rounds.arguments["run_dir"] == tmp_path


def test_a_failed_drill_is_told_and_ends_with_1(kvberth_command, rounds, tmp_path):
    """With what was wrong; the figures are written all the same."""
    rounds.failing.add("calm")
    done = kvberth_command("faults", "--drill", "calm", "--json", tmp_path / "f.json", "--markdown", tmp_path / "f.md")
    assert done.exit_code == 1
    assert "it broke" in done.stderr
    report = json.loads((tmp_path / "f.json").read_text())
    assert (report["drills"], report["failed"], report["requests"], report["right"]) == (1, 1, 3, 3)
    assert report["rows"][0]["problems"] == ["it broke"]
    assert "| calm | 1 | 3 |" in (tmp_path / "f.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--drill", "calmer"], "drill: there is no 'calmer'; there are calm, kill-prefill"),
        (["--quick", "--drill", "calm"], "give either --quick or --drill"),
        (["--soak", 60, "--quick"], "soak: chooses its drills itself"),
        (["--json", "/nowhere/f.json"], "there is no folder /nowhere"),
    ],
)
def test_bad_arguments_are_named(kvberth_command, rounds, arguments, text):
    """Before anything is started."""
    done = kvberth_command("faults", *arguments)
    assert done.exit_code == 2
    assert text in done.stderr


def test_a_cluster_that_does_not_start_is_an_error(kvberth_command, rounds):
    """With the end of its log, and where the logs are."""
    rounds.error = LaunchError("prefill-0 ended with status 3")
    done = kvberth_command("faults", "--drill", "calm")
    assert done.exit_code == 1
    assert "prefill-0 ended with status 3\nlogs are in " in done.stderr


@pytest.mark.parametrize("problems", [[], ["router grows by 100.0 MB per hour (± 1.0)"]])
def test_a_long_run_is_judged_by_its_memory_too(kvberth_command, monkeypatch, tmp_path, problems):
    """Memory that grows fails a run of which each minute passed; the JSON has the minutes and the memory."""

    async def soak(seconds, *, on_row, **_):
        rows = [DrillRow(drill="calm", round=1, seed=0, requests=3, right=3)]
        on_row(rows)
        return SoakReport(
            seconds=seconds, rate=7.0, capacity=10.0, drills=report_of(rows), memory=[], problems=problems
        )

    monkeypatch.setattr(kvberth.drills, "soak", soak)
    done = kvberth_command("faults", "--soak", 90, "--json", tmp_path / "soak.json")
    assert done.exit_code == (1 if problems else 0)
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["seconds"], report["drills"]["requests"], report["problems"]) == (90.0, 3, problems)


def test_drills_are_listed(kvberth_command, rounds):
    """With a line each, and nothing is started."""
    done = kvberth_command("faults", "--list")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == len(DRILLS)
    assert not hasattr(rounds, "names")
