"""`kvberth bench`: flags, what it writes, how it ends."""

import dataclasses
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvberth.bench
from kvberth.bench import (
    Arrivals,
    RandomTraffic,
    RequestRecord,
    Target,
    TraceTraffic,
    read_records,
    read_trace,
    summarise,
)
from kvberth.cli import bench, options

from ..bench import fakes

TRACES = Path(__file__).parents[1] / "bench" / "traces"

QUICK = ["--requests", 4, "--rate", 200, "--prompt-tokens", 8, "--output-tokens", 3, "--warmup", 1]


@pytest.fixture
def server():
    with fakes.listening_in_thread(fakes.generates()) as fake:
        yield fake


@pytest.fixture
def asked_for(monkeypatch):
    """What `run_blocking` was called with; nothing is sent."""
    calls = []

    def run_blocking(plan, target, **_):
        calls.append((plan, target))
        return kvberth.bench.RunResult("m", (), summarise([]))

    monkeypatch.setattr(kvberth.bench, "run_blocking", run_blocking)
    return calls


def test_every_flag_is_used(kvberth_command, asked_for):
    """No setting is dropped on the way."""
    flags = (
        "--url http://h:1/ --model m --rate 9 --requests 3 --prompt-tokens 5 --output-tokens 6 --arrivals uniform "
        "--seed 7 --warmup 1 --timeout 8 --token-range 3:90 --header A=b=c --header x-kvberth-mode=pull "
        "--prefix-share 0.5 --prefixes 2 --turns 2 --cancel-share 0.5 --cancel-seconds 9"
    )
    assert kvberth_command("bench", *flags.split()).exit_code == 0
    [(plan, target)] = asked_for
    headers = {"a": "b=c", "x-kvberth-mode": "pull"}
    assert target == Target(url="http://h:1", model="m", headers=headers, timeout_seconds=8)
    traffic = RandomTraffic(
        requests=3,
        rate=9,
        arrivals=Arrivals.UNIFORM,
        prompt_tokens=5,
        output_tokens=6,
        token_range=(3, 90),
        prefix_share=0.5,
        prefixes=2,
        turns=2,
        cancel_share=0.5,
        cancel_seconds=9,
        warmup=1,
        seed=7,
    )
    assert plan.sha256() == traffic.plan().sha256()


def test_defaults_are_the_package_s_own(kvberth_command, asked_for):
    """The command repeats the defaults, so that --help shows them, and repeats them right."""
    kvberth_command("bench", "--url", "http://h")
    [(plan, target)] = asked_for
    assert target == Target(url="http://h")
    assert plan.sha256() == RandomTraffic().plan().sha256()


def test_every_setting_of_the_traffic_has_a_flag():
    """A setting that is added there must be added here."""
    names = {each.name for each in dataclasses.fields(RandomTraffic)}
    assert names <= inspect.signature(bench.bench).parameters.keys()


def test_every_flag_of_a_trace_is_used(kvberth_command, asked_for):
    """Likewise."""
    path = TRACES / "sharegpt.json"
    flags = f"--url http://h --trace {path} --requests 3 --turns 2 --skip-bad-rows --arrivals uniform --rate 9 --seed 7"
    flags += " --output-tokens 5 --cancel-share 0.5 --warmup 1"
    assert kvberth_command("bench", *flags.split()).exit_code == 0
    traffic = TraceTraffic(
        trace=read_trace(path, requests=3, turns=2, skip_bad_rows=True),
        requests=3,
        arrivals=Arrivals.UNIFORM,
        rate=9,
        seed=7,
        output_tokens=5,
        cancel_share=0.5,
        warmup=1,
    )
    assert asked_for[0][0].sha256() == traffic.plan().sha256()


@pytest.mark.parametrize(
    ("name", "arrivals"), [("mooncake.jsonl", Arrivals.TRACE), ("sharegpt.json", Arrivals.POISSON)]
)
def test_a_trace_keeps_its_times_if_it_has_some(kvberth_command, asked_for, name, arrivals):
    """And its lengths, unless others are asked for."""
    path = TRACES / name
    assert kvberth_command("bench", "--url", "http://h", "--trace", path, "--skip-bad-rows").exit_code == 0
    traffic = TraceTraffic(trace=read_trace(path, requests=100, skip_bad_rows=True), arrivals=arrivals)
    assert asked_for[0][0].sha256() == traffic.plan().sha256()


def test_speed(kvberth_command, asked_for):
    """Of a trace's own times."""
    kvberth_command("bench", "--url", "http://h", "--trace", TRACES / "burstgpt.csv", "--speed", 4)
    assert [each.arrival_seconds for each in asked_for[0][0].requests] == [0.0, 3.0, 3.375]


def test_rows_that_are_left_out_are_said(kvberth_command, server, tmp_path):
    """On stderr with their number and the first; in the results all of them."""
    path = TRACES / "burstgpt-sessions.csv"
    flags = ["--trace", path, "--skip-bad-rows", "--speed", 1000, "--warmup", 0, "--out", tmp_path / "r", "--json"]
    result = kvberth_command("bench", "--url", server.url, *flags)
    reason = "Response tokens: 0, a request that had failed; files 'without_fails' have none"
    assert f"warning: 1 rows of {path} left out; the first is line 3: {reason}\n" in result.stderr
    traffic = json.loads(result.stdout)["environment"]["traffic"]
    assert traffic["trace"]["skipped"] == [{"line": 3, "reason": reason}]
    assert traffic["trace"]["file"] == "burstgpt-sessions.csv"
    assert len(traffic["sha256"]) == 64


def test_cancelled_requests_are_counted(kvberth_command, server):
    """And fail nothing."""
    server.behave = fakes.generates(seconds_per_token=0.02)
    flags = ["--requests", 3, "--rate", 200, "--prompt-tokens", 8, "--output-tokens", 50, "--warmup", 0]
    result = kvberth_command("bench", "--url", server.url, *flags, "--cancel-share", 1, "--cancel-seconds", 0.2)
    assert result.exit_code == 0
    assert "0 of 3 requests succeeded, 3 were cancelled in " in result.stdout


def test_a_generator_that_fell_behind_has_its_own_status(kvberth_command, monkeypatch):
    """The figures are shown, and are no success."""
    late = {"planned_s": 0.0, "sent_s": 0.09, "late_ms": 90.0, "prompt_tokens": 1}
    summary = summarise([RequestRecord(index=0, request_id="a", **late)])

    def run_blocking(*_, **__):
        return kvberth.bench.RunResult("m", (), summary)

    monkeypatch.setattr(kvberth.bench, "run_blocking", run_blocking)
    result = kvberth_command("bench", "--url", "http://h")
    assert result.exit_code == 3
    assert "warning: the generator has fallen behind: half the requests went out more than 90 ms late" in result.stderr


def test_arrivals_are_the_package_s():
    """The command's own copy of the enum, there for a quick start, has not drifted."""
    assert {each.value for each in options.Arrivals} == {each.value for each in Arrivals}


def test_settings_file(kvberth_command, asked_for, settings_file):
    """Its table is [bench]."""
    path = settings_file('[bench]\nurl = "http://h"\nrequests = 2\nheader = ["a=b"]\n')
    assert kvberth_command("bench", "--config", path).exit_code == 0
    assert (len(asked_for[0][0].requests), asked_for[0][1].headers) == (2, {"a": "b"})


def test_the_table(kvberth_command, server):
    """Throughput, each quantity, and the machine, on 80 columns."""
    result = kvberth_command("bench", "--url", server.url, *QUICK)
    assert (result.exit_code, len(server.bodies)) == (0, 5)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 of 4 requests succeeded in ")
    names = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert names == ["TTFT", "TPOT", "ITL", "E2E latency", "sent late"]
    assert max(map(len, lines)) <= 80


def test_results_on_disk(kvberth_command, server, tmp_path):
    """Records that give the summary again, and where they came from."""
    out = tmp_path / "new" / "results"
    result = kvberth_command("bench", "--url", server.url, *QUICK, "--seed", 5, "--out", out)
    assert result.exit_code == 0
    assert str(out / "requests.jsonl") in result.stdout.replace("\n", "")
    records = read_records(out / "requests.jsonl")
    assert sorted(record.index for record in records) == [0, 1, 2, 3]
    report = json.loads((out / "summary.json").read_text())
    assert report["summary"]["ttft_ms"]["p50"] == summarise(records).ttft_ms.p50
    environment = report["environment"]
    assert (environment["url"], environment["model"]) == (server.url, "fake-model")
    assert environment["traffic"]["seed"] == 5
    assert environment["versions"]["kvberth"] == kvberth.__version__
    assert environment["machine"]["cpus"] >= 1


def test_json_is_what_the_file_has(kvberth_command, server, tmp_path):
    """And stdout has nothing else."""
    result = kvberth_command("bench", "--url", server.url, *QUICK, "--out", tmp_path / "r", "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "r" / "summary.json").read_text())


def test_secrets_stay_out_of_results(kvberth_command, server):
    """They are sent, and not written; our own headers are part of the result."""
    headers = ["--header", "Authorization=Bearer s3cret", "--header", "x-kvberth-mode=pull"]
    result = kvberth_command("bench", "--url", server.url, *QUICK, *headers, "--json")
    assert server.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in result.output
    assert json.loads(result.stdout)["environment"]["headers"] == {"authorization": "***", "x-kvberth-mode": "pull"}


def test_a_failed_request_fails_the_command(kvberth_command, server):
    """Exit status 1, with the number and one of the reasons."""
    server.behave = fakes.in_turn(fakes.generates(), fakes.answers(500, {"error": "no [bold]room"}), fakes.generates())
    result = kvberth_command("bench", "--url", server.url, *QUICK)
    assert result.exit_code == 1
    assert "3 of 4 requests succeeded" in result.stdout
    assert "1 failed: HTTP 500: no [bold]room\n" in result.stdout


def test_warnings_are_on_stderr(kvberth_command, monkeypatch):
    """So that --json stays JSON."""
    summary = summarise([], idle_share=0.1)

    def run_blocking(*_, **__):
        return kvberth.bench.RunResult("m", (), summary)

    monkeypatch.setattr(kvberth.bench, "run_blocking", run_blocking)
    result = kvberth_command("bench", "--url", "http://h", "--json")
    json.loads(result.stdout)
    assert result.stderr == ("warning: the machine had only 10% idle: the figures show this machine, not the servers\n")


def test_a_server_that_cannot_be_measured(kvberth_command, server, tmp_path):
    """Exit status 1 and one line."""
    server.behave = fakes.answers(500, {"error": "no room"})
    result = kvberth_command("bench", "--url", server.url, *QUICK)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "kvberth: warm-up request 1 of 1 failed: HTTP 500: no room\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "Missing option '--url'; see 'kvberth bench --help'"),
        ("--url h:1", "url: 'h:1' is no server's URL, expected something like http://127.0.0.1:8000"),
        ("--url http://h --rate 0", "rate: must be above 0 requests per second, not 0.0"),
        ("--url http://h --requests 0", "requests: must be 1 or more, not 0"),
        ("--url http://h --timeout 0", "timeout_seconds: must be above 0 and finite, not 0.0"),
        ("--url http://h --header mode", "header: 'mode' must be K=V, such as x-kvberth-mode=pull"),
        ("--url http://h --token-range 5", "token_range: '5' must be LOW:HIGH, such as 1000:20000"),
        ("--url http://h --token-range 9:5", "token_range: must be LOW:HIGH with 0 <= LOW < HIGH, not 9:5"),
        ("--url http://h --arrivals trace", "arrivals: trace needs a trace, with --trace FILE"),
        ("--url http://h --speed 2", "speed: needs a trace"),
        ("--url http://h --skip-bad-rows", "skip_bad_rows: needs a trace"),
        (f"--url http://h --trace {TRACES}/sharegpt.json --turns 0", "turns: must be 1 or more, not 0"),
        (f"--url http://h --trace {TRACES}/burstgpt.csv --requests -1", "requests: must be 1 or more, not -1"),
        ("--url http://h --trace /dev/null", "trace: /dev/null: the file is empty"),
        ("--url http://h --trace x --prompt-tokens 5", "prompt_tokens: a trace has its own"),
        (
            f"--url http://h --trace {TRACES}/burstgpt.csv --rate 5",
            "rate: the trace's times decide; set --speed, or --arrivals poisson",
        ),
        (
            f"--url http://h --trace {TRACES}/burstgpt-sessions.csv",
            f"trace: {TRACES}/burstgpt-sessions.csv:3: Response tokens: 0, a request that had failed; files "
            "'without_fails' have none; skip_bad_rows leaves such rows out",
        ),
        ("--url http://h --out /dev/null/x", "out: /dev/null/x cannot be written: Not a directory"),
    ],
)
def test_bad_arguments_are_one_line(kvberth_command, asked_for, flags, message):
    """What is wrong and what would be right, exit status 2, and nothing is sent."""
    result = kvberth_command("bench", *flags.split())
    assert (result.exit_code, result.stderr) == (2, f"kvberth: {message}\n")
    assert not asked_for


def test_results_are_never_overwritten(kvberth_command, server, tmp_path):
    """Found out before anything is sent."""
    (tmp_path / "requests.jsonl").write_text("precious")
    result = kvberth_command("bench", "--url", server.url, *QUICK, "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"kvberth: out: {tmp_path} has results already, or is no folder; name a new one\n"
    assert not server.bodies
    assert (tmp_path / "requests.jsonl").read_text() == "precious"


def test_help_is_complete(kvberth_command):
    """Every flag has a text."""
    result = kvberth_command("bench", "--help")
    assert result.exit_code == 0
    assert "Exit status" in result.stdout
    assert "…" not in result.stdout


def test_ctrl_c_keeps_the_records(server, tmp_path):
    """What had ended is on disk; one line, no traceback, exit status 1."""
    command = [sys.executable, "-m", "kvberth", "bench", "--url", server.url, *QUICK, "--requests", 1000]
    command += ["--rate", 20, "--out", tmp_path / "r"]
    # A shell's background job ignores Ctrl-C, and what it starts inherits that.
    with subprocess.Popen(
        [str(each) for each in command],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one call, no lock
    ) as process:
        records = tmp_path / "r" / "requests.jsonl"
        while not (records.exists() and records.stat().st_size):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors == f"kvberth: stopped before the end; the requests that had ended are in {records}\n"
    assert read_records(records)
