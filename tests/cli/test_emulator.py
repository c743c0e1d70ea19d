"""`kvberth emulator`: what it lists, prints and writes, and how mistakes are told."""

import json

import pytest

from kvberth.emulator import load_profile, profile_names
from kvberth.emulator.profile import parse_profile

from ..emulator.simulated import TIMING, low_rates, simulate, traffic, write_run


@pytest.fixture
def run_dirs(tmp_path):
    """Folders of runs that tell all figures."""
    return [
        write_run(tmp_path / f"run-{index}", simulate(requests), seed=index)
        for index, requests in enumerate(low_rates())
    ]


@pytest.fixture
def flags(tmp_path):
    return ["--base", "qwen3-32b-8xh200", "--name", "mine", "--out", tmp_path / "mine.toml"]


def test_profiles_are_listed(kvberth_command):
    """All of them, on 80 columns, with no name cut off."""
    result = kvberth_command("emulator", "profiles")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(sum(line.split()[:1] == [name] for line in lines) == 2 for name in profile_names())


def test_key_figures(kvberth_command):
    """As the timing of the profile gives them: a prompt of 16k in two chunks takes two steps."""
    rows = {row["name"]: row for row in json.loads(kvberth_command("emulator", "profiles", "--json").stdout)}
    assert list(rows) == profile_names()
    assert rows["qwen3-32b-8xh200"] == {
        "name": "qwen3-32b-8xh200",
        "title": "Qwen3-32B on 8 x H200 (P5en)",
        "prefill_16k_ms": pytest.approx(2 * 5.55 + 16384 * 4.99e-3 + 16384**2 / 2 * 168e-9, abs=0.001),
        "decode_step_batch_1_ms": pytest.approx(5.55 + 0.09 + 1024 * 6.83e-6, abs=0.001),
        "decode_step_batch_16_ms": pytest.approx(5.55 + 16 * (0.09 + 1024 * 6.83e-6), abs=0.001),
        "kv_bytes_per_token": 262144,
        "bytes_scale": 512.0,
    }


@pytest.mark.parametrize("name", profile_names())
def test_show(kvberth_command, name):
    """TOML that is the profile."""
    result = kvberth_command("emulator", "show", name)
    assert result.exit_code == 0
    assert parse_profile(result.stdout, "stdout") == load_profile(name)


def test_calibrate(kvberth_command, run_dirs, flags, tmp_path):
    """Writes the profile; prints base and fitted figures, the quality of the fit and the file, on 80 columns."""
    result = kvberth_command("emulator", "calibrate", *run_dirs, *flags)
    assert (result.exit_code, result.stderr) == (0, "")
    profile = load_profile(tmp_path / "mine.toml")
    assert profile.timing.step_us == pytest.approx(TIMING.step_us, rel=0.01)
    assert "run-0 (2026-11-02T10:00:00+00:00), run-1" in profile.sources["timing.step_us"]
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["step", "sequence", "context token", "prompt token", "prompt pair"]
    assert [row[4] for row in rows] == ["µs", "µs", "ns", "µs", "ps"]
    assert rows[0][1:3] == ["5550", f"{profile.timing.step_us:g}"]
    assert " gaps between tokens, median error 0.0%\n" in result.stdout
    assert " first tokens, median error 0.0%\n" in result.stdout
    assert lines[-1] == f"profile  {tmp_path / 'mine.toml'}"


def test_calibrate_for_machines(kvberth_command, run_dirs, flags, tmp_path):
    """The same as JSON; warnings are on stderr besides."""
    run_dirs[3] = write_run(tmp_path / "stopped", simulate(low_rates()[3]))
    result = kvberth_command("emulator", "calibrate", *run_dirs, *flags, "--batched-tokens", 8192, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["profile"], report["file"]) == ("mine", str(tmp_path / "mine.toml"))
    assert [figure["name"] for figure in report["figures"]] == list(TIMING.__struct_fields__)
    [warning] = report["warnings"]
    assert warning.startswith("stopped has no summary: ")
    assert result.stderr == f"warning: {warning}\n"


def test_a_figure_of_the_base(kvberth_command, tmp_path, flags):
    """Is called so."""
    each = [traffic(1.0, 20, 512), traffic(1.0, 20, 8192, seed=1), traffic(8.0, 60, 512, seed=3)]
    runs = [write_run(tmp_path / f"run-{index}", simulate(requests), seed=index) for index, requests in enumerate(each)]
    result = kvberth_command("emulator", "calibrate", *runs, *flags)
    [row] = [line for line in result.stdout.splitlines() if line.startswith("│ prompt pair")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["prompt pair", "168", "as base", "-", "ps"]
    assert result.stderr == "warning: prompt_pair_ps is the base profile's: only two prompt lengths were measured\n"


def test_a_profile_of_the_user_s_as_base(kvberth_command, run_dirs, flags, tmp_path, monkeypatch):
    """By its path; the file is named after the new profile if nothing else is said."""
    base = tmp_path / "base.toml"
    base.write_text(kvberth_command("emulator", "show", "small").stdout)
    monkeypatch.chdir(tmp_path)
    result = kvberth_command("emulator", "calibrate", *run_dirs, "--base", base, "--name", "mine")
    assert result.exit_code == 0
    assert load_profile("mine.toml").model == load_profile("small").model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing command; see 'kvberth emulator --help'"),
        ("show", "Missing argument 'PROFILE'; see 'kvberth emulator show --help'"),
        ("show big", "there is no profile big: give one of llama-3.3-70b-8xh100, "),
        ("show big.toml", "profile big.toml: No such file or directory"),
        ("calibrate --base small --name x", "Missing argument 'RUN_DIR'"),
        ("calibrate r --name x", "Missing option '--base'"),
        ("calibrate r --base small", "Missing option '--name'"),
        (
            "calibrate r --base small --name x --out x.json",
            "out: x.json must end in .toml, by which a profile is told ",
        ),
        ("calibrate r --base small --name x", "r/requests.jsonl: No such file or directory; give folders that "),
        ("calibrate {run} --base big --name x", "there is no profile big: give one of "),
        ("calibrate {run} --base small --name a/b --out x.toml", "name: 'a/b' must be of letters, digits, "),
        ("calibrate {run} --base small --name small", "name: small comes with kvberth; take another one, "),
        ("calibrate {run} --base small --name x --batched-tokens 0", "batched_tokens: must be 1 or more, not 0"),
        ("calibrate {run} --base small --name x", "prompts of one length (512) cannot tell the time per token "),
        ("calibrate {run} --base small --name x --out {run}/no/x.toml", "prompts of one length (512) cannot tell "),
    ],
)
def test_mistakes_are_one_line(kvberth_command, run_dirs, tmp_path, monkeypatch, arguments, message):
    """What is wrong and what would be right, exit status 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    result = kvberth_command("emulator", *arguments.format(run=run_dirs[0]).split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvberth: {message}")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.toml"))


def test_a_file_that_cannot_be_written(kvberth_command, run_dirs, tmp_path):
    """One line too."""
    path = tmp_path / "no" / "x.toml"
    result = kvberth_command("emulator", "calibrate", *run_dirs, "--base", "small", "--name", "x", "--out", path)
    assert result.exit_code == 2
    assert result.stderr == f"kvberth: out: {path} cannot be written: No such file or directory\n"


def test_profiles_are_never_overwritten(kvberth_command, run_dirs, flags, tmp_path):
    """Somebody may serve it."""
    (tmp_path / "mine.toml").write_text("precious")
    result = kvberth_command("emulator", "calibrate", *run_dirs, *flags)
    assert result.exit_code == 2
    assert result.stderr == f"kvberth: out: {tmp_path / 'mine.toml'} is there already; name a new one\n"
    assert (tmp_path / "mine.toml").read_text() == "precious"


@pytest.mark.parametrize("command", ["profiles", "show", "calibrate"])
def test_help_is_complete(kvberth_command, command):
    """Every flag has a text that is not cut off."""
    result = kvberth_command("emulator", command, "--help")
    assert result.exit_code == 0
    assert "…" not in result.stdout
