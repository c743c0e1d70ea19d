"""`kvberth doctor`: how rows are shown and what the exit status says."""

import json

import pytest

from kvberth.cli.doctor import Check, Status, command

OK = Check("Python", Status.OK, "3.11.7")
WARN = Check("open files", Status.WARN, "limit [256]", "raise it")
FAIL = Check("NIXL", Status.FAIL, "not installed", "install it")


@pytest.fixture
def finds(monkeypatch):
    """Give the rows that the probes return."""
    return lambda *checks: monkeypatch.setattr(command, "_probes", lambda: [lambda each=each: each for each in checks])


def test_json_has_one_object_per_check(kvberth_command, finds):
    """In the order of the probes, with the verdict on all of them."""
    finds(OK, FAIL)
    assert json.loads(kvberth_command("doctor", "--json").stdout) == {
        "ok": False,
        "checks": [
            {"name": "Python", "status": "ok", "found": "3.11.7", "advice": None},
            {"name": "NIXL", "status": "fail", "found": "not installed", "advice": "install it"},
        ],
    }


@pytest.mark.parametrize(("checks", "status"), [([OK, WARN], 0), ([OK, FAIL, WARN], 1)])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_only_a_failure_fails(kvberth_command, finds, checks, status, flags):
    """A warning is no reason for a script to stop."""
    finds(*checks)
    assert kvberth_command("doctor", *flags).exit_code == status


def test_text_says_what_to_do(kvberth_command, finds):
    """Advice stands below what was found; brackets in it are text."""
    finds(OK, WARN)
    result = kvberth_command("doctor")
    assert [line.split(maxsplit=1)[0] for line in result.stdout.splitlines()] == ["ok", "warn", "→"]
    assert "limit [256]" in result.stdout
    assert "→ raise it" in result.stdout
    assert result.stderr == ""
