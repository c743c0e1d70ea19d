"""`kvberth faults`: which drills it does, what it writes, how it ends."""

import json

import pytest

import kvberth.drills
from kvberth.drills import DRILLS, QUICK, DrillRow, SoakReport, report_of
from kvberth.launch import LaunchError


@pytest.fixture
def rounds(monkeypatch):
    """In place of `run_drills`: what it was called with, which of the drills fail, and how many there is time for."""

    class Rounds:
        def __init__(self):
            self.failing, self.error, self.most = set(), None, 10_000

        async def __call__(self, turns, *, on_row, **arguments):
            self.turns, self.arguments = turns, arguments
            if self.error is not None:
                raise self.error
            for turn in turns[: self.most]:
                problems = ["it broke"] if turn.drill.name in self.failing else []
                on_row(
                    DrillRow(
                        drill=turn.drill.name, round=turn.round, seed=turn.seed, requests=3, right=3, problems=problems
                    )
                )
            return max(0, len(turns) - self.most)

        @property
        def names(self):
            return [turn.drill.name for turn in self.turns]

    fake = Rounds()
    monkeypatch.setattr(kvberth.drills, "run_drills", fake)
    return fake


def test_all_drills_by_default(kvberth_command, rounds):
    """Once each; passed is status 0."""
    done = kvberth_command("faults")
    assert done.exit_code == 0
    assert sorted(rounds.names) == sorted(drill.name for drill in DRILLS)
    assert "to do of the others" in done.stderr
    assert f"{len(DRILLS)} drills, 0 failed, 0 skipped; {3 * len(DRILLS)} requests" in done.stdout


def test_flags_choose_the_drills(kvberth_command, rounds, tmp_path):
    """Quick, or by name; rounds, seed and logs reach the runner."""
    kvberth_command("faults", "--quick")
    assert sorted(rounds.names) == sorted(QUICK)
    kvberth_command(
        "faults", "--drill", "kill-decode", "--drill", "calm", "--repeat", 3, "--seed", 7, "--run-dir", tmp_path
    )
    assert [(turn.drill.name, turn.round, turn.seed) for turn in rounds.turns] == [
        *(("kill-decode", number, 6 + number) for number in (1, 2, 3)),
        *(("calm", number, 6 + number) for number in (1, 2, 3)),
    ]
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
    assert "| calm | 1 | - | 3 |" in (tmp_path / "f.md").read_text()


def test_a_run_goes_on_where_it_was_stopped(kvberth_command, rounds, tmp_path):
    """In sittings, each of which says what is left; the last one's figures are those of all."""
    rounds.most = 3
    arguments = ("faults", "--drill", "calm", "--repeat", 5, "--minutes", 1, "--resume", "--json", tmp_path / "f.json")
    done = kvberth_command(*arguments)
    assert (done.exit_code, rounds.arguments["limit_seconds"]) == (0, 60)
    assert "2 drills are left; --resume goes on" in done.stdout
    done = kvberth_command(*arguments)
    assert [turn.round for turn in rounds.turns] == [4, 5]
    assert "3 done before" in done.stderr
    report = json.loads((tmp_path / "f.json").read_text())
    assert [row["round"] for row in report["rows"]] == [1, 2, 3, 4, 5]
    assert report["requests"] == 15


@pytest.mark.parametrize(
    ("content", "arguments", "text"),
    [
        (None, ["--resume"], "resume: needs --json"),
        ("{}", ["--resume", "--json", "{file}"], "is not what kvberth faults writes: Object missing required field"),
        ("", ["--resume", "--json", "{file}", "--seed", 3], "its rows are of seed 0, not 3"),
    ],
)
def test_what_cannot_be_gone_on_with_is_named(kvberth_command, rounds, tmp_path, content, arguments, text):
    """Nothing is started, and the file stays."""
    file = tmp_path / "f.json"
    kvberth_command("faults", "--drill", "calm", "--json", file)
    if content:
        file.write_text(content)
    before = file.read_bytes()
    done = kvberth_command("faults", "--drill", "calm", *(str(each).format(file=file) for each in arguments))
    assert done.exit_code == 2
    assert text in " ".join(done.stderr.split())
    assert file.read_bytes() == before


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
        row = DrillRow(drill="calm", round=1, seed=0, requests=3, right=3)
        on_row(row)
        return SoakReport(
            seconds=seconds,
            rate=7.0,
            capacity=10.0,
            leaving=0.1,
            drills=report_of([row]),
            memory=[],
            problems=problems,
        )

    monkeypatch.setattr(kvberth.drills, "soak", soak)
    files = ("--json", tmp_path / "soak.json", "--markdown", tmp_path / "soak.md")
    done = kvberth_command("faults", "--soak", 90, *files)
    assert done.exit_code == (1 if problems else 0)
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["seconds"], report["drills"]["requests"], report["problems"]) == (90.0, 3, problems)
    assert all(each in (tmp_path / "soak.md").read_text() for each in ["| calm | 1 |", *problems])


def test_drills_are_listed(kvberth_command, rounds):
    """With a line each, and nothing is started."""
    done = kvberth_command("faults", "--list")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == len(DRILLS)
    assert not hasattr(rounds, "names")
