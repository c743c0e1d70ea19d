"""Which drills come when, and how long they take."""

import pytest

from kvberth.drills.catalogue import CORE, DRILLS, find
from kvberth.drills.plan import estimated_seconds, plan_lines, plan_turns
from kvberth.drills.results import DrillRow

SOME = [find("calm"), find("kill-decode"), find("kill-prefill")]


def row(drill: str, number: int, *, seed: int = 7, seconds: float = 12.0) -> DrillRow:
    return DrillRow(drill=drill, round=number, seed=seed + number - 1, seconds=seconds)


def test_all_rounds_of_those_that_stand_for_their_kinds_come_first():
    """A run that is stopped has then done something of each kind."""
    turns = [(turn.drill.name, turn.round, turn.seed) for turn in plan_turns(SOME, 2, seed=7)]
    first = [(name, number, 6 + number) for number in (1, 2) for name in ("kill-decode", "kill-prefill")]
    assert turns == [*first, ("calm", 1, 7), ("calm", 2, 8)]


def test_what_is_done_is_not_done_again():
    """Also if it has failed: that is a result."""
    done = [row("kill-decode", 1), row("calm", 2)]
    turns = [(turn.drill.name, turn.round) for turn in plan_turns(SOME, 2, 7, done)]
    assert turns == [("kill-prefill", 1), ("kill-decode", 2), ("kill-prefill", 2), ("calm", 1)]


def test_rows_of_another_seed_are_refused():
    """They are of another plan."""
    with pytest.raises(ValueError, match="its rows are of seed 3, not 7"):
        plan_turns(SOME, 2, 7, [row("calm", 2, seed=3)])


def test_the_estimate_is_of_what_was_measured():
    """Where that is known."""
    turns = plan_turns([find("calm")], 3, 7)
    assert estimated_seconds(turns, [row("calm", 9, seconds=20.0), row("calm", 10, seconds=30.0)]) == 75.0
    assert 3 * 10 < estimated_seconds(turns) < 3 * 30


def test_the_plan_is_told_in_words():
    """With what is done, and the time that is left."""
    done = [row("kill-decode", number, seconds=30.0) for number in range(1, 6)]
    lines = plan_lines(plan_turns([find("kill-decode"), find("calm")], 125, 7, done), done)
    assert lines[0] == "5 done before"
    assert lines[1] == "120 to do of the drills that stand for their kinds (1 drills), about 1 h 0 min"
    assert lines[2].startswith("125 to do of the others (1 drills), about ")


def test_the_drills_that_stand_for_their_kinds_exist():
    """Each is named once; the page counts them."""
    assert len(set(CORE)) == len(CORE) == 22
    assert set(CORE) <= {each.name for each in DRILLS}
