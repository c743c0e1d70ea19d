"""The map from faults of the field to tests is in step with the tests."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "design" / "faults.md"


def rows() -> list[list[str]]:
    """The tables' rows, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if not line.startswith(("| kind |", "| --- |"))
    ]


def names_of_tests(path: Path) -> set[str]:
    """Names of test functions and, for Hypothesis's machines, of test classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if name.startswith("test_")}


def test_every_test_that_the_map_names_exists():
    """Under the name that the map gives it."""
    there = set().union(*(names_of_tests(path) for path in TESTS.rglob("test_*.py")))
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert named - there == set()


def test_every_fault_has_a_test_with_machines_and_a_source():
    """Five columns, the third and the last of them never empty."""
    assert len(rows()) == 28
    for row in rows():
        assert len(row) == 5, row[0]
        assert "`test_" in row[2], row[0]
        assert re.search(r"\d|documentation", row[4]), row[0]
