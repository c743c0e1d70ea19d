"""`kvberth compare` and `kvberth report`: flags, how they end, what they print."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the report needs it")

import kvberth.compare
from kvberth.compare import Folder, FolderError, settings

from ..bench import fakes
from ..compare.conftest import fill, manifest
from ..compare.conftest import settings as few

EMULATED = ("--emulate", "small")
TINY = ("--rates", "50", "--prompts", "64", "--seconds", "0.01", "--repetitions", "1", "--output-tokens", "2")


@pytest.fixture
def asked_for(monkeypatch):
    """The settings that a comparison was begun with; nothing is measured."""
    found = []

    def begin(chosen, folder, *, resume):
        found.append((chosen, resume))
        return folder.resume(chosen) if resume else folder.create(manifest(chosen))

    monkeypatch.setattr(kvberth.compare, "begin", begin)
    monkeypatch.setattr(kvberth.compare, "compare", lambda *_: None)
    return found


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(fakes.listening_in_thread(fakes.generates(0.001))) for _ in range(2)]


def test_every_flag_is_used(kvberth_command, asked_for, tmp_path):
    """No setting is dropped on the way."""
    flags = (
        "--modes push,pull --rates 1,2.5 --prompts 100,200 --output-tokens 9 --arrivals poisson --cancel-share 0.1 "
        "--seconds 4 --repetitions 2 --seed 7 --emulate-link --engine-arg=--x --price-per-gpu-hour 2 "
        "--gpus-per-engine 8"
    )
    kvberth_command("compare", *EMULATED, "--out", tmp_path, *flags.split())
    [(chosen, resume)] = asked_for
    assert not resume
    assert chosen == settings.CompareSettings(
        model="small",
        emulate=True,
        emulate_link=True,
        modes=("push", "pull"),
        rates=(1.0, 2.5),
        prompts=(100, 200),
        output_tokens=9,
        arrivals="poisson",
        cancel_share=0.1,
        seconds=4.0,
        repetitions=2,
        seed=7,
        engine_args=("--x",),
        price_per_gpu_hour=2.0,
        gpus_per_engine=8,
    )


@pytest.mark.parametrize("preset", ["quick", "published"])
def test_presets_are_the_package_s(kvberth_command, asked_for, tmp_path, preset):
    """And a flag beside one counts."""
    kvberth_command("compare", *EMULATED, "--out", tmp_path, f"--{preset}", "--repetitions", "5")
    expected = getattr(settings, preset)() | {"model": "small", "emulate": True, "repetitions": 5}
    assert asked_for[0][0] == settings.make(expected)


TRACES = Path(__file__).parents[1] / "bench" / "traces"


def test_every_flag_of_other_traffic_is_used(kvberth_command, asked_for, tmp_path):
    """Conversations, shared beginnings, clients that go away."""
    flags = "--turns 3 --prefix-share 0.5 --prefixes 2 --no-prefix-caching --cancel-share 0.2 --cancel-seconds 2"
    kvberth_command("compare", *EMULATED, "--out", tmp_path, *flags.split())
    [(chosen, _)] = asked_for
    assert chosen == settings.CompareSettings(
        model="small",
        emulate=True,
        turns=3,
        prefix_share=0.5,
        prefixes=2,
        prefix_caching=False,
        cancel_share=0.2,
        cancel_seconds=2.0,
    )


def test_a_trace_in_place_of_prompts(kvberth_command, asked_for, tmp_path):
    """At its own times and with its own answers, unless the user says otherwise."""
    path = TRACES / "mooncake.jsonl"
    command = ("compare", *EMULATED, "--out", tmp_path / "a", "--trace", path, "--requests", 3)
    result = kvberth_command(*command, "--speed", "1,2")
    assert result.exit_code == 1, result.stderr  # since nothing was measured
    [(chosen, _)] = asked_for
    assert (chosen.arrivals, chosen.output_tokens, chosen.trace.requests) == ("trace", None, 3)
    assert chosen.trace.speeds == (1.0, 2.0)
    other = (*command[:3], "--out", tmp_path / "b", *command[5:])
    kvberth_command(*other, "--arrivals", "poisson", "--rates", "2", "--output-tokens", 9)
    chosen, _ = asked_for[1]
    assert (chosen.arrivals, chosen.output_tokens, chosen.rates) == ("poisson", 9, (2.0,))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--speed", "2"), "speed: needs a trace"),
        (("--requests", "2"), "requests: needs a trace"),
        (("--trace", "nothing"), "trace: nothing: No such file"),
        (("--trace", TRACES / "mooncake.jsonl", "--prompts", "64"), "prompts: a trace has its own"),
        (("--trace", TRACES / "mooncake.jsonl", "--rates", "2"), "rates: the trace's times decide"),
        (
            ("--trace", TRACES / "mooncake.jsonl", "--arrivals", "poisson", "--speed", "2"),
            "speed: is for arrivals trace; for poisson set --rates",
        ),
        (("--trace", TRACES / "mooncake.jsonl", "--speed", "0"), "speed: must be above 0"),
        (("--prefix-share", "2"), "prefix_share: must be 0 or more and below 1"),
        (("--published", "--turns", "2"), "extra: these cells have random prompts"),
    ],
)
def test_bad_traffic(kvberth_command, tmp_path, arguments, says):
    """One line, status 2, and no folder."""
    result = kvberth_command("compare", *EMULATED, "--out", tmp_path / "out", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"kvberth: {says}")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_starts_nothing(kvberth_command, tmp_path):
    """It says what would be measured, and how long that takes."""
    result = kvberth_command("compare", *EMULATED, "--published", "--dry-run", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "prefix-caching" in result.stdout
    assert re.search(r"288 cells on 48 clusters, one at a time, about \d+ min", result.stdout)
    assert not (tmp_path / "out").exists()


def test_real_engines_are_compared_in_the_modes_that_they_have(kvberth_command, asked_for, tmp_path):
    """vLLM's own connectors are for emulated ones."""
    kvberth_command("compare", "--model", "m", "--out", tmp_path)
    assert asked_for[0][0].modes == ("push", "push-whole", "pull", "colocated")


def test_defaults_are_the_package_s_own(kvberth_command, asked_for, tmp_path):
    """The command repeats some, so that --help shows them, and repeats them right."""
    kvberth_command("compare", *EMULATED, "--out", tmp_path)
    assert asked_for[0][0] == settings.CompareSettings(model="small", emulate=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "emulate, model, attach: give exactly one of them"),
        ((*EMULATED, "--model", "m"), "emulate, model, attach: give exactly one of them"),
        (("--emulate", "nothing"), "emulate: "),
        ((*EMULATED, "--quick", "--published"), "quick, published: only one of them makes sense"),
        ((*EMULATED, "--rates", "1;2"), "rates: '1;2' must be numbers with commas between them, such as 1,2,4"),
        ((*EMULATED, "--prompts", "1k"), "prompts: '1k' must be numbers with commas between them, such as 1,2,4"),
        ((*EMULATED, "--modes", "pusch"), "modes: 'pusch' is none; known are push, push-whole"),
        ((*EMULATED, "--repetitions", "0"), "repetitions: must be 1 or more, not 0"),
        (("--attach", "push"), "attach: 'push' must be MODE=URL, such as push=http://127.0.0.1:8000"),
        (("--attach", "a=http://h", "--attach", "a=http://i"), "attach: each mode needs a name of its own"),
        ((*EMULATED, "--resume"), "out: "),
    ],
)
def test_bad_arguments(kvberth_command, tmp_path, arguments, says):
    """One line that says what would be right, and status 2; nothing has been started."""
    result = kvberth_command("compare", "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kvberth: {says}")
    assert result.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written(kvberth_command, asked_for, tmp_path):
    """Found out before anything is measured."""
    (tmp_path / "file").write_text("")
    result = kvberth_command("compare", *EMULATED, "--out", tmp_path / "file")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "cannot be written" in result.stderr


def test_a_folder_with_other_settings(kvberth_command, asked_for, tmp_path):
    """`--resume` names what differs."""
    Folder(tmp_path).create(manifest(few()))
    result = kvberth_command("compare", *EMULATED, "--out", tmp_path, "--resume")
    assert result.exit_code == 2
    assert "was begun with modes push, vllm-pull, not push, push-whole" in result.stderr


def test_a_folder_that_has_results(kvberth_command, asked_for, tmp_path):
    """Nothing is overwritten, and the user learns how to go on."""
    folder = Folder(tmp_path)
    folder.create(manifest(few()))
    fill(folder, few())
    result = kvberth_command("compare", *EMULATED, "--out", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "has a comparison already; --resume goes on with it" in result.stderr
    assert not folder.report_path.exists()


def attach(servers):
    return [each for name, server in zip("ab", servers, strict=True) for each in ("--attach", f"{name}={server.url}")]


def test_deployments_that_run(kvberth_command, servers, tmp_path):
    """Measured, summed up, reported: status 0, the verdict last but for the report's place."""
    result = kvberth_command("compare", *attach(servers), *TINY, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "prompts at 50 requests/s" in result.stdout
    assert result.stdout.splitlines()[-1] == f"report  {tmp_path / 'report.html'}"
    assert json.loads((tmp_path / "summary.json").read_bytes())["is_complete"] is True
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert "2/2 cells" in result.stderr


def test_what_is_missing_is_an_error(kvberth_command, servers, tmp_path):
    """One deployment is not there: the report is written, the status is 1, and why stands on stderr."""
    gone = ("--attach", "gone=http://127.0.0.1:9")
    result = kvberth_command("compare", *attach(servers), *gone, *TINY, "--out", tmp_path)
    assert result.exit_code == 1
    assert "does not answer" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("kvberth: 1 cells could not be measured")
    assert (tmp_path / "report.html").exists()


def test_ctrl_c_keeps_what_there_is(servers, tmp_path):
    """SIGTERM as well: the cells until then are reported, and --resume goes on to the end."""
    arguments = ["compare", *attach(servers), "--rates", "2", "--prompts", "64", "--seconds", "2", "--repetitions", "1"]
    command_line = [sys.executable, "-m", "kvberth", *arguments, "--output-tokens", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command_line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (cells := len(list((tmp_path / "out" / "raw").glob("*.jsonl")))) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert (cells, process.returncode) == (1, 1)
    assert stderr.splitlines()[-1] == "kvberth: stopped with 1 cells missing; --resume goes on"
    assert (tmp_path / "out" / "report.html").exists()
    done = subprocess.run([*command_line, "--resume"], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["is_complete"] is True


def test_a_disk_that_is_full(kvberth_command, monkeypatch, tmp_path):
    """What was measured is kept and reported as far as the disk allows: one line, status 1."""
    folder = Folder(tmp_path)
    folder.create(manifest(few()))
    fill(folder, few(), skip=lambda key: key.startswith("r1"))

    def full(*_):
        raise FolderError("x.jsonl cannot be written: No space left on device")

    monkeypatch.setattr(kvberth.compare, "begin", lambda *_, **__: None)
    monkeypatch.setattr(kvberth.compare, "compare", full)
    result = kvberth_command("compare", *EMULATED, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "min\nkvberth: x.jsonl cannot be written: No space left on device; the cells that were measured are kept, and "
        "--resume goes on\n"
    )
    assert json.loads((tmp_path / "summary.json").read_bytes())["is_complete"] is False


def test_report_makes_everything_again(kvberth_command, tmp_path):
    """From the raw lines alone."""
    folder = Folder(tmp_path)
    folder.create(manifest(few()))
    fill(folder, few())
    printed = {
        kind: kvberth_command("report", tmp_path, "--format", kind).stdout for kind in ("table", "md", "csv", "json")
    }
    assert printed["md"].startswith("# This traffic wants kvberth push")
    assert printed["csv"].startswith("mode,group,cell,rate")
    assert json.loads(printed["json"]) == json.loads((tmp_path / "summary.json").read_bytes())
    assert "vllm-pull" in printed["table"]
    priced = kvberth_command(
        "report", tmp_path, "--format", "json", "--price-per-gpu-hour", 2, "--gpus-per-engine", 8
    ).stdout
    cell = json.loads(priced)["cells"][0]
    assert cell["cost_per_request"] == pytest.approx(2 * 8 * 2 / 3600 / cell["requests_per_second"])


def test_report_on_nothing(kvberth_command, tmp_path):
    """One line, status 1."""
    result = kvberth_command("report", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "has no comparison in it" in result.stderr


def test_without_the_packages_of_the_report(kvberth_command, monkeypatch, tmp_path):
    """Said before an hour of measuring, not after it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = kvberth_command("compare", *EMULATED, "--out", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'kvberth[compare]'" in result.stderr


def test_help_lists_every_mode(kvberth_command):
    """The list in the text is the package's."""
    shown = kvberth_command("compare", "--help").stdout
    listed = "".join(shown.split())
    assert all(str(mode) in listed for mode in kvberth.compare.Mode if mode != "decode-only")
