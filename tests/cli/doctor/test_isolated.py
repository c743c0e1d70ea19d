"""Code in a process of its own: every way to end is an outcome."""

import pytest

from kvberth.cli.doctor.isolated import Outcome, run_isolated


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('chatter')", Outcome(True)),
        ("import no_such_module_here", Outcome(False, "ModuleNotFoundError: No module named 'no_such_module_here'")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Outcome(False, "killed by SIGSEGV")),
        ("import os; os._exit(3)", Outcome(False, "exit status 3")),
    ],
)
def test_the_end_is_told_in_one_line(code, outcome):
    """A crash in a C library is a finding like any other."""
    assert run_isolated(code) == outcome


def test_a_hang_ends():
    """A library that never returns does not hold the doctor."""
    assert run_isolated("import time; time.sleep(60)", timeout_seconds=0.2) == Outcome(False, "no end after 0.2 s")
