"""`kvberth bench`: flags, what it writes, how it ends."""

import dataclasses
import inspect
import json
import signal
import subprocess
import sys
import time

import pytest

import kvberth.bench
from kvberth.bench import Arrivals, RandomTraffic, Target, read_records, summarise
from kvberth.cli import bench

from ..bench import fakes

QUICK = ["--requests", 4, "--rate", 200, "--prompt-tokens", 8, "--output-tokens", 3, "--warmup", 1]


@pytest.fixture
def server():
    with fakes.listening_in_thread(fakes.generates()) as fake:
        yield fake


@pytest.fixture
def asked_for(monkeypatch):
    """What `run` was called with; nothing is sent."""
    calls = []

    async def run(plan, target, **_):
        calls.append((plan, target))
        return kvberth.bench.RunResult("m", (), summarise([]))

    monkeypatch.setattr(kvberth.bench, "run", run)
    return calls


def as_lists(plan):
    return [
        (each.arrival_seconds, each.prompt_token_ids.tolist(), each.output_tokens)
        for each in (*plan.warmup, *plan.requests)
    ]


def test_every_flag_is_used(kvberth_command, asked_for):
    """No setting is dropped on the way."""
    flags = (
        "--url http://h:1/ --model m --rate 9 --requests 3 --prompt-tokens 5 --output-tokens 6 --arrivals uniform "
        "--seed 7 --warmup 1 --timeout 8 --token-range 3:90 --header A=b=c --header x-kvberth-mode=pull"
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
        warmup=1,
        seed=7,
    )
    assert as_lists(plan) == as_lists(traffic.plan())


def test_defaults_are_the_package_s_own(kvberth_command, asked_for):
    """The command repeats the defaults, so that --help shows them, and repeats them right."""
    kvberth_command("bench", "--url", "http://h")
    [(plan, target)] = asked_for
    assert target == Target(url="http://h")
    assert as_lists(plan) == as_lists(RandomTraffic().plan())


def test_every_setting_of_the_traffic_has_a_flag():
    """A setting that is added there must be added here."""
    names = {each.name for each in dataclasses.fields(RandomTraffic)}
    assert names <= inspect.signature(bench.bench).parameters.keys()


def test_arrivals_are_the_package_s():
    """The command's own copy of the enum, there for a quick start, has not drifted."""
    assert {each.value for each in bench.Arrivals} == {each.value for each in Arrivals}


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

    async def run(*_, **__):
        return kvberth.bench.RunResult("m", (), summary)

    monkeypatch.setattr(kvberth.bench, "run", run)
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
