"""The command as a whole: help, start, and how mistakes are told."""

import subprocess
import sys

import pytest

COMMANDS = ["up", "router", "bench", "compare", "report", "faults", "doctor", "version", "keys", "emulator"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(kvberth_command, command):
    """Every option has a text and is not cut off."""
    result = kvberth_command(command, "--help")
    assert result.exit_code == 0
    lines = result.stdout.partition("Options:\n")[2].splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  --"):
            has_text = len(line.strip().split("  ", 1)) > 1 or following.startswith(" " * 20)
            assert has_text, line
            assert "…" not in line


def test_help_names_every_command(kvberth_command):
    """And no other."""
    listed = kvberth_command("--help").stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines() if line[2] != " "] == COMMANDS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command; see 'kvberth --help'"),
        (["uup"], "No such command 'uup'"),
        (["up"], "model: give --model, or --emulate for an emulated engine"),
        (["up", "--model", "m", "--prefil", "2"], "No such option: --prefil"),
        (["up", "--model", "m", "--mode", "shove"], "Invalid value for '--mode': 'shove' is not one of 'push', 'pull'"),
        (["up", "--model", "m", "--prefill", "two"], "Invalid value for '--prefill': "),
        (["up", "--model", "m", "--decode", "0"], "decode: must be 1 or more beside 1 prefill workers, not 0\n"),
        (["router", "--decode", "http://d", "--port", "0"], "Invalid value for '--port': "),
        (["version", "now"], "Got unexpected extra argument"),
    ],
)
def test_mistakes_are_one_line(kvberth_command, arguments, message):
    """One line on stderr, exit status 2, nothing on stdout."""
    result = kvberth_command(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvberth: {message}")
    assert result.stderr.count("\n") == 1


def test_help_is_quick_and_loads_no_engine():
    """Under half a second of processor time, without any of the heavy libraries."""
    program = (
        "import sys\n"
        "from kvberth.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'vllm', 'torch', 'nixl', 'zmq', 'starlette', 'aiohttp', 'numpy', 'msgspec'} & sys.modules.keys()\n"
        "import time\n"
        "print(sorted(heavy), time.process_time(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    heavy, seconds = done.stderr.rsplit(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 0.5


def test_it_runs_as_a_module():
    """`python -m kvberth` is the same command, under the same name."""
    done = subprocess.run([sys.executable, "-m", "kvberth", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: kvberth ")
