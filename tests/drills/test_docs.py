"""The page on reliability is in step with the drills and the tests."""

import re

from tests.test_faults_map import TESTS, names_of_tests
from tests.test_faults_map import rows as kinds_of_faults

from kvberth.drills import DRILLS

PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()


def table_under(title: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    below = PAGE.partition(f"## {title}\n")[2]
    table = below[below.index("| ") :].partition("\n\n")[0]
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


def test_the_map_names_kinds_and_drills_that_exist():
    """The kinds are those of the page on faults."""
    kinds = {row[0] for row in kinds_of_faults()}
    mapped = table_under("Kinds of faults from the field, and drills")
    assert {row[0] for row in mapped} <= kinds
    assert len(mapped) > 15


def test_every_drill_and_test_that_the_page_names_exists():
    """Under the name that the page gives it."""
    named = set(re.findall(r"`([a-z_-]+)`", PAGE.partition("## Kinds of faults")[2]))
    tests = set().union(*(names_of_tests(path) for path in TESTS.rglob("test_*.py")))
    others = {"degraded"}
    assert named <= tests | {each.name for each in DRILLS} | others
