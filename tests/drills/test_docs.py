"""The page on reliability is in step with the drills and the tests."""

import re

from tests.test_faults_map import TESTS, names_of_tests
from tests.test_faults_map import rows as kinds_of_faults

from kvberth.drills import DRILLS

PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()


def table_under(title: str, number: int = 0) -> list[list[str]]:
    """The rows of a table under a heading, the first one or another."""
    below = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    table = [part for part in below.strip().split("\n\n") if part.startswith("| ")][number]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_every_drill_is_explained():
    """As the command explains it, with what is excused and how long blocks may be held."""
    explained = [tuple(row) for row in table_under("The drills")]
    assert explained == [
        (
            f"`{each.name}`",
            each.what,
            ", ".join(sorted(each.excused)) or "-",
            f"{each.settle_seconds:g} s",
        )
        for each in DRILLS
    ]


def test_the_map_has_every_kind_with_a_drill_or_a_test():
    """The kinds are those of the page on faults, in its order."""
    mapped = table_under("Kinds of faults from the field")
    assert [row[0] for row in mapped] == [row[0] for row in kinds_of_faults()]
    for row in mapped:
        assert "`" in row[1] + row[2], row[0]


def test_the_other_kinds_have_a_test_each():
    """Five of routers and operators, six about speed, each with its source."""
    others = table_under("Kinds of faults from the field", number=1)
    assert len(others) == 11
    for row in others:
        assert "`test_" in row[1], row[0]
        assert row[2], row[0]


def test_every_drill_and_test_that_the_page_names_exists():
    """Under the name that the page gives it."""
    named = set(re.findall(r"`([a-z_-]+)`", PAGE.partition("## Kinds of faults")[2]))
    tests = set().union(*(names_of_tests(path) for path in TESTS.rglob("test_*.py")))
    others = {"degraded"}
    assert named <= tests | {each.name for each in DRILLS} | others


def test_the_figures_are_of_drills_that_exist():
    """A drill that was renamed or removed leaves no figures behind."""
    figures = table_under("Last figures")
    assert {row[0] for row in figures} <= {each.name for each in DRILLS}
    assert len(figures) >= 19
