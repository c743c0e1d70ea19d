"""Rows are added up."""

import msgspec

from kvberth.drills.results import DrillRow, Report, report_of, table_of

ROWS = [
    DrillRow(drill="kill", round=1, seed=0, felt=5, trace="processes gone", requests=10, right=9, refused=1),
    DrillRow(
        drill="kill",
        round=2,
        seed=1,
        felt=2,
        trace="processes gone",
        requests=12,
        right=11,
        wrong=1,
        problems=["request 3 wrong: x"],
    ),
    DrillRow(drill="cut", round=1, seed=0, skipped="needs root"),
]


def test_sums():
    """A skipped drill is none that passed."""
    report = report_of(ROWS)
    assert (report.drills, report.failed, report.skipped) == (2, 1, 1)
    assert (report.requests, report.right, report.refused, report.wrong) == (22, 20, 1, 1)
    assert report.hung == report.leaked_blocks == report.corruptions == 0


def test_report_survives_json():
    """As machines read it."""
    report = report_of(ROWS)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_table_has_a_line_per_drill_that_was_done():
    """Rounds added up, and what each fault has touched in the round in which that was least."""
    head, rule, *lines = table_of(ROWS).splitlines()
    assert head.count("|") == rule.count("|") == lines[0].count("|")
    assert lines == ["| kill | 2 | 2 processes gone | 22 | 20 | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 1 |"]
