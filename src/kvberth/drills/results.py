"""What drills found, as rows: the JSON of `kvberth faults`, and the table in the docs. No I/O."""

from collections import Counter
from collections.abc import Sequence

import msgspec

__all__ = ["DrillRow", "Report", "report_of", "table_of"]


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """One drill, once.

    Attributes:
        began_seconds: when the fault began, from the start of the traffic.
        felt: what the fault has touched, in numbers of `trace`; a drill whose fault has touched nothing has failed.
        broken: requests whose connection broke without a word; only the router's own death excuses it.
        leaked_blocks: held by all engines when nothing should be.
        seconds: that the drill took, all in all.
        problems: all that must not have been, in words; empty is passed.
        skipped: why it was not done; None if it was.
    """

    drill: str
    round: int
    seed: int
    began_seconds: float = 0.0
    felt: int = 0
    trace: str = ""
    requests: int = 0
    right: int = 0
    refused: int = 0
    left: int = 0
    broken: int = 0
    wrong: int = 0
    hung: int = 0
    leaked_blocks: int = 0
    corruptions: int = 0
    slowest_seconds: float = 0.0
    seconds: float = 0.0
    problems: list[str] = []
    skipped: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, and their sums. `drills` and `failed` count rows that were done; a drill of five rounds has five."""

    drills: int
    failed: int
    skipped: int
    requests: int
    right: int
    refused: int
    left: int
    broken: int
    wrong: int
    hung: int
    leaked_blocks: int
    corruptions: int
    rows: list[DrillRow]


_SUMS = ("requests", "right", "refused", "left", "broken", "wrong", "hung", "leaked_blocks", "corruptions")


def report_of(rows: Sequence[DrillRow]) -> Report:
    """The rows with their sums."""
    done = [row for row in rows if row.skipped is None]
    return Report(
        drills=len(done),
        failed=sum(bool(row.problems) for row in done),
        skipped=len(rows) - len(done),
        **{name: sum(getattr(row, name) for row in done) for name in _SUMS},
        rows=list(rows),
    )


def table_of(rows: Sequence[DrillRow]) -> str:
    """A Markdown table, one line per drill, rounds added up."""
    lines = [
        "| drill | rounds | felt, at least | requests | right | refused | left | broken | wrong | hung | leaked blocks "
        "| corruptions | failed |",
        "| --- |" + " --- |" * 12,
    ]
    done = [row for row in rows if row.skipped is None]
    for name, rounds in Counter(row.drill for row in done).items():
        ours = [row for row in done if row.drill == name]
        sums = [str(sum(getattr(row, each) for row in ours)) for each in _SUMS]
        failed = sum(bool(row.problems) for row in ours)
        least = min(ours, key=lambda row: row.felt)
        felt = f"{least.felt} {least.trace}" if least.trace else "-"
        lines.append(f"| {name} | {rounds} | {felt} | {' | '.join(sums)} | {failed} |")
    return "\n".join(lines) + "\n"
