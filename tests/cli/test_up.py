"""`kvberth up`: what it starts, what it says, how it ends."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvberth.cli.up import example
from kvberth.launch import ClusterSettings, LaunchError


def raises(error):
    def fail():
        raise error

    return fail


def test_every_flag_reaches_the_cluster(kvberth_command, cluster):
    """No setting is dropped on the way."""
    flags = (
        "--model m --prefill 2 --decode 3 --mode pull --host 0.0.0.0 --port 8123 --served-model-name s --dtype float32 "
        "--max-model-len 512 --block-size 32 --run-dir /runs/1 --engine-arg=--seed=1 --engine-arg --enforce-eager"
    )
    assert kvberth_command("up", *flags.split()).exit_code == 0
    assert cluster.settings == ClusterSettings(
        model="m",
        prefill=2,
        decode=3,
        mode="pull",
        host="0.0.0.0",
        port=8123,
        served_model_name="s",
        dtype="float32",
        max_model_len=512,
        block_size=32,
        run_dir=Path("/runs/1"),
        engine_args=("--seed=1", "--enforce-eager"),
    )


def test_defaults_are_the_cluster_s_own(kvberth_command, cluster):
    """The command repeats no default differently."""
    kvberth_command("up", "--model", "m")
    assert cluster.settings == ClusterSettings(model="m")


def test_it_says_where_things_are(kvberth_command, cluster):
    """URL, logs and a request to try are on stdout, and nothing else is."""
    result = kvberth_command("up", "--model", "m")
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()] == [
        ["router", cluster.router_url],
        ["logs", str(cluster.run_dir)],
        ["try", example(cluster.router_url, "m")],
    ]
    assert cluster.console.stderr


def test_example_survives_the_shell():
    """A model's name with a quote in it does not break the command line."""
    arguments = shlex.split(example("http://h:1", 'it\'s "m"'))
    assert arguments[1] == "http://h:1/v1/completions"
    assert json.loads(arguments[-1])["model"] == 'it\'s "m"'


def test_served_name_is_what_the_example_asks_for(kvberth_command, cluster):
    """Clients must use the served name."""
    assert '"model": "s"' in kvberth_command("up", "--model", "m", "--served-model-name", "s").stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["on_enter", "on_wait"])
def test_a_signal_stops_everything(kvberth_command, cluster, number, moment):
    """Ctrl-C and SIGTERM are an orderly end, while it starts as well."""
    setattr(cluster, moment, lambda: signal.raise_signal(number))
    result = kvberth_command("up", "--model", "m")
    assert (result.exit_code, result.exception) == (0, None)
    assert "stopped" in result.stderr
    assert cluster.stops == (moment == "on_wait")


def test_a_second_signal_does_not_cut_the_stop_short(kvberth_command, cluster):
    """An impatient user leaves no engine behind."""
    cluster.on_wait = lambda: signal.raise_signal(signal.SIGINT)
    cluster.on_exit = lambda: signal.raise_signal(signal.SIGINT)
    assert kvberth_command("up", "--model", "m").exit_code == 0
    assert cluster.stops == 1


def test_signal_handlers_are_given_back(kvberth_command, cluster):
    """Who calls the command from Python keeps its handlers."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    cluster.on_wait = lambda: signal.raise_signal(signal.SIGTERM)
    kvberth_command("up", "--model", "m")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("moment", ["on_enter", "on_wait"])
def test_a_dead_engine_ends_it_with_its_log(kvberth_command, cluster, moment):
    """Exit status 1 and the log's tail, without a traceback."""
    setattr(cluster, moment, raises(LaunchError("prefill-0 ended with status 3; the end of p.log:\n    out of memory")))
    result = kvberth_command("up", "--model", "m")
    assert result.exit_code == 1
    assert "kvberth: prefill-0 ended with status 3; the end of p.log:\n    out of memory\n" in result.stderr


@pytest.mark.parametrize("model", ["/no/such/folder", "./no/such/folder", "~/no/such/folder"])
def test_a_model_s_folder_must_be_there(kvberth_command, cluster, model):
    """A mistake in a path is told at once; a name that is no path is vLLM's to find."""
    result = kvberth_command("up", "--model", model)
    assert (result.exit_code, result.stderr) == (2, f"kvberth: model: there is no folder {model}\n")
    assert cluster.settings is None


def test_an_unusable_folder_is_no_traceback(kvberth_command, cluster):
    """What the system refuses is told in its words."""
    cluster.on_enter = raises(PermissionError(13, "Permission denied", "/runs"))
    result = kvberth_command("up", "--model", "m")
    assert (result.exit_code, result.stderr) == (1, "kvberth: [Errno 13] Permission denied: '/runs'\n")


PROGRAM = """
import pathlib, time
import kvberth.launch
from kvberth.cli import main

class Cluster:
    router_url, run_dir = "http://127.0.0.1:1", pathlib.Path("/logs")
    def __init__(self, settings, console=None): pass
    def __enter__(self): return self
    def __exit__(self, *_): print("stopped all", flush=True)
    def wait(self): time.sleep(60)

kvberth.launch.LocalCluster = Cluster
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_process_ends_well(number):
    """Signals from outside, through the real entry point."""
    command = [sys.executable, "-c", PROGRAM, "up", "--model", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(number)
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "stopped all\n")
    assert "Traceback" not in errors
