"""Which drills are to be done in which order, and how long that will take. No I/O and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvberth.drills.catalogue import CORE, Drill
from kvberth.drills.results import DrillRow

__all__ = ["Turn", "estimated_seconds", "plan_lines", "plan_turns"]

_AROUND_SECONDS = 10.0
"""A drill takes so much longer than its fault lasts; a guess, until it has been done once."""
_CLUSTER_SECONDS = 60.0
"""To start a cluster and warm it up."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One drill in one round."""

    drill: Drill
    round: int
    seed: int


def plan_turns(drills: Sequence[Drill], rounds: int, seed: int, done: Sequence[DrillRow] = ()) -> list[Turn]:
    """What is left to do: all rounds of the drills that stand for their kinds, then all rounds of the others.

    Args:
        seed: of the first round; each has the next.
        done: rows of turns that need not be done again.

    Raises:
        ValueError: the rows are of another seed.
    """
    core = [each for each in drills if each.name in CORE]
    others = [each for each in drills if each.name not in CORE]
    for row in done:
        if row.seed != seed + row.round - 1:
            raise ValueError(f"its rows are of seed {row.seed - row.round + 1}, not {seed}")
    there = {(row.drill, row.round) for row in done}
    return [
        Turn(drill, number, seed + number - 1)
        for group in (core, others)
        for number in range(1, rounds + 1)
        for drill in group
        if (drill.name, number) not in there
    ]


def estimated_seconds(turns: Sequence[Turn], done: Sequence[DrillRow] = ()) -> float:
    """How long they will take, by how long the same drills have taken, as far as they have been done."""
    taken: dict[str, list[float]] = {}
    for row in done:
        if row.seconds:
            taken.setdefault(row.drill, []).append(row.seconds)
    means = {name: sum(each) / len(each) for name, each in taken.items()}
    return sum(means.get(turn.drill.name, turn.drill.hold_seconds + _AROUND_SECONDS) for turn in turns)


def plan_lines(turns: Sequence[Turn], done: Sequence[DrillRow] = ()) -> list[str]:
    """The plan in words: what is done, what is to come, and how long that will take."""
    core = [turn for turn in turns if turn.drill.name in CORE]
    others = [turn for turn in turns if turn.drill.name not in CORE]
    lines = [f"{len(done)} done before"] if done else []
    for group, what in ((core, "of the drills that stand for their kinds"), (others, "of the others")):
        if group:
            names = len({turn.drill.name for turn in group})
            lines.append(f"{len(group)} to do {what} ({names} drills), about {_span(estimated_seconds(group, done))}")
    if turns:
        lines.append(f"in all about {_span(_CLUSTER_SECONDS + estimated_seconds(turns, done))}")
    return lines


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"
