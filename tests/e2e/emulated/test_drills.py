"""A round of drills on a real, emulated cluster; `make drills` does all of them, many times."""

import asyncio

import pytest
from rich.console import Console

from kvberth.drills import QUICK, DrillRow, find, plan_turns, run_drills


@pytest.fixture(scope="module")
def rows(pool, tmp_path_factory):
    """Those of `kvberth faults --quick`, by name."""
    pool.close()  # the machine has no room for two clusters
    rows: list[DrillRow] = []
    asyncio.run(
        run_drills(
            plan_turns([find(name) for name in QUICK], rounds=1, seed=0),
            run_dir=tmp_path_factory.mktemp("drills"),
            console=Console(force_terminal=False),
            on_row=rows.append,
        )
    )
    return {row.drill: row for row in rows}


@pytest.mark.parametrize("name", QUICK)
def test_drill(rows, name):
    """The fault was felt, every request is accounted for, nothing is left, and `/health` told the truth."""
    row = rows[name]
    if row.skipped is not None:
        pytest.skip(row.skipped)
    assert row.problems == []
    assert row.felt > 0
    assert row.requests > 20
    assert row.right + row.refused + row.left == row.requests
    assert row.wrong == row.hung == row.broken == row.leaked_blocks == row.corruptions == 0
