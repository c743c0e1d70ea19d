"""`kvberth up`: what it starts, what it says, how it ends."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvberth import emulator
from kvberth.cli.options import ConnectorChoice
from kvberth.cli.up import example
from kvberth.launch import ClusterSettings, Connector, LaunchError


@pytest.fixture
def cluster(cluster):
    """With a router, and with an engine beside it for each that is asked for."""

    class Engine:
        def __init__(self, number):
            self.url = f"http://127.0.0.1:{20002 + number}"

    def enter():
        cluster.undivided = [Engine(number) for number in range(cluster.settings.undivided)]
        cluster.router = object() if cluster.settings.decode else None

    cluster.on_enter = enter
    cluster.undivided, cluster.router = [], None
    return cluster


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


# Emulated engines.


def test_every_flag_of_emulated_engines_reaches_the_cluster(kvberth_command, cluster):
    """The profile stands for the model."""
    flags = "--emulate small --emulate-link --connector vllm --undivided 1 --mode pull"
    assert kvberth_command("up", *flags.split()).exit_code == 0
    assert cluster.settings == ClusterSettings(
        model="small", emulate=True, emulate_link=True, connector=Connector.VLLM, undivided=1, mode="pull"
    )


def test_a_profile_alone_is_enough(kvberth_command, cluster):
    """All else is as for a real model."""
    assert kvberth_command("up", "--emulate", "small").exit_code == 0
    assert cluster.settings == ClusterSettings(model="small", emulate=True)


def test_a_file_is_a_profile(kvberth_command, cluster, tmp_path):
    """Its path is what the engines get; clients call it by the file's name."""
    path = tmp_path / "mine.toml"
    path.write_text(emulator.profile.dump_profile(emulator.load_profile("small")))
    result = kvberth_command("up", "--emulate", path)
    assert cluster.settings == ClusterSettings(model=str(path), emulate=True)
    assert '"model": "mine"' in result.stdout


@pytest.mark.parametrize(("served", "expected"), [((), "qwen3-32b-8xh200"), (("--served-model-name", "s"), "s")])
def test_the_example_asks_for_the_profile(kvberth_command, cluster, served, expected):
    """By the name that the engines go by."""
    result = kvberth_command("up", "--emulate", "qwen3-32b-8xh200", *served)
    assert f'"model": "{expected}"' in result.stdout


def test_the_example_asks_for_a_profile_with_a_dot(kvberth_command, cluster):
    """A name is no file's."""
    result = kvberth_command("up", "--emulate", "llama-3.3-70b-8xh100")
    assert '"model": "llama-3.3-70b-8xh100"' in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "model: give --model, or --emulate for an emulated engine"),
        (["--model", "m", "--emulate", "small"], "model: give either --model or --emulate, not both"),
        (
            ["--emulate", "smal"],
            "emulate: there is no profile smal: give one of llama-3.3-70b-8xh100, qwen3-32b-8xh200, small, "
            "or the path of a .toml file",
        ),
        (["--emulate", "/no/such.toml"], "emulate: profile /no/such.toml: No such file or directory"),
        (
            ["--emulate", "./folder"],
            "emulate: there is no profile ./folder: give one of llama-3.3-70b-8xh100, "
            "qwen3-32b-8xh200, small, or the path of a .toml file",
        ),
        (
            ["--model", "m", "--connector", "vllm"],
            "connector: vllm is for emulated engines; the router cannot find real ones that have it",
        ),
        (["--model", "m", "--emulate-link"], "emulate_link: there is no link to emulate without emulated engines"),
    ],
)
def test_what_cannot_be_emulated_is_one_line(kvberth_command, cluster, flags, message):
    """What is wrong and what would be right, exit status 2, and nothing is started."""
    result = kvberth_command("up", *flags)
    assert (result.exit_code, result.stderr) == (2, f"kvberth: {message}\n")
    assert cluster.settings is None


def test_a_broken_profile_is_told_before_anything_starts(kvberth_command, cluster, tmp_path):
    """In one line that names the figure."""
    path = tmp_path / "mine.toml"
    text = emulator.profile.dump_profile(emulator.load_profile("small"))
    path.write_text(text.replace("step_us = 4000.0", "step_us = -1.0"))
    result = kvberth_command("up", "--emulate", path)
    assert (result.exit_code, result.stderr) == (
        2,
        "kvberth: emulate: profile small: timing.step_us must be 0 or more, not -1.0\n",
    )
    assert cluster.settings is None


def test_a_profile_can_come_from_a_file_of_settings(kvberth_command, cluster, settings_file):
    """As every other setting."""
    path = settings_file('[up]\nemulate = "small"\nconnector = "vllm"\n')
    assert kvberth_command("up", "--config", path).exit_code == 0
    assert cluster.settings == ClusterSettings(model="small", emulate=True, connector=Connector.VLLM)


def test_the_link_can_come_from_a_file_of_settings(kvberth_command, cluster, settings_file):
    """As TOML says it."""
    path = settings_file('[up]\nemulate = "small"\nemulate_link = true\n')
    assert kvberth_command("up", "--config", path).exit_code == 0
    assert cluster.settings == ClusterSettings(model="small", emulate=True, emulate_link=True)


def test_connectors_are_the_launcher_s():
    """The command's own copy of the enum, there for a quick start, has not drifted."""
    assert {each.value for each in ConnectorChoice} == {each.value for each in Connector}


def test_it_says_where_undivided_engines_are(kvberth_command, cluster):
    """Beside the router's address; the example goes to the router."""
    result = kvberth_command("up", "--model", "m", "--undivided", "2")
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()] == [
        ["router", cluster.router_url],
        ["engine", "http://127.0.0.1:20002"],
        ["engine", "http://127.0.0.1:20003"],
        ["logs", str(cluster.run_dir)],
        ["try", example(cluster.router_url, "m")],
    ]


def test_engines_alone_are_asked_themselves(kvberth_command, cluster):
    """Without decode workers there is no router."""
    flags = "--model m --prefill 0 --decode 0 --undivided 1"
    result = kvberth_command("up", *flags.split())
    assert [line.split(maxsplit=1) for line in result.stdout.splitlines()] == [
        ["engine", "http://127.0.0.1:20002"],
        ["logs", str(cluster.run_dir)],
        ["try", example("http://127.0.0.1:20002", "m")],
    ]


PROGRAM = """
import pathlib, time
import kvberth.launch
from kvberth.cli import main

class Cluster:
    router_url, run_dir, router, undivided = "http://127.0.0.1:1", pathlib.Path("/logs"), "router", []
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
