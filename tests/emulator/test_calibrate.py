"""Calibration finds the timing of simulated engines again, and says what it cannot tell."""

import dataclasses

import msgspec
import pytest

from kvberth.emulator import EmulatorError, load_profile
from kvberth.emulator.calibrate import MeasuredRequest, MeasuredRun, calibrate, read_run
from kvberth.emulator.profile import Timing, dump_profile

from .simulated import TIMING, Noise, low_rates, simulate, traffic, write_run

BASE = load_profile("llama-3.3-70b-8xh100")
KEYS = Timing.__struct_fields__


def runs_of(each_traffic, **settings):
    return [simulate(requests, name=f"run-{index}", **settings) for index, requests in enumerate(each_traffic)]


def errors_of(calibration, timing=TIMING):
    """How far off each figure of the new profile is, relative to the truth."""
    return {key: abs(getattr(calibration.profile.timing, key) / getattr(timing, key) - 1) for key in KEYS}


def test_all_figures_are_found_again():
    """Without noise to half a percent, whatever the base says."""
    calibration = calibrate(runs_of(low_rates()), BASE, "mine")
    assert max(errors_of(calibration).values()) < 0.005
    assert calibration.overhead_ms == pytest.approx(0, abs=0.01)
    assert max(calibration.gap_error, calibration.first_token_error) < 1e-3
    assert calibration.warnings == ()


@pytest.mark.parametrize("seed", range(4))
def test_all_figures_are_found_in_noise(seed):
    """HTTP, jitter, chunks that come late or together, and stalls: within a tenth, and the overhead is told apart."""
    noise = Noise(overhead_ms=3.0, jitter_ms=0.3, late=0.05, merged=0.02, stalls=0.002)
    calibration = calibrate(runs_of(low_rates(seed), noise=noise), BASE, "mine")
    assert max(errors_of(calibration).values()) < 0.10
    assert calibration.overhead_ms == pytest.approx(3.3, abs=0.3)
    assert calibration.warnings == ()


def test_chunked_prompts():
    """A prompt in 32 chunks pays for 32 steps; the engine's own limit goes into the profile."""
    calibration = calibrate(runs_of(low_rates(), batched_tokens=512), BASE, "mine", batched_tokens=512)
    assert max(errors_of(calibration).values()) < 0.01
    assert calibration.profile.engine == msgspec.structs.replace(BASE.engine, batched_tokens=512)


def test_an_engine_that_is_never_idle():
    """First tokens among others that decode: less exact, and said to be."""
    each = [traffic(3.0, 150, [512, 4096, 12000], outputs=400, seed=seed) for seed in range(3)]
    calibration = calibrate(runs_of(each), BASE, "mine")
    assert max(errors_of(calibration).values()) < 0.15
    assert calibration.warnings == (
        "first tokens were measured while others decoded; a run with --rate 0.5 would be more exact",
    )


def test_each_run_has_its_own_time():
    """Runs that started at once on their clocks do not disturb each other."""
    runs = runs_of(low_rates())
    alone = calibrate([simulate([request for each in low_rates() for request in each])], BASE, "mine")
    together = calibrate(runs, BASE, "mine")
    assert together.first_tokens > alone.first_tokens


def test_failed_requests():
    """What was refused cost nothing; what came to no first token may have been in prefill ever since."""
    *others, last = runs_of(low_rates())
    refused = MeasuredRequest(sent_s=0.0, prompt_tokens=9, status=429, error="HTTP 429: full")
    lost = MeasuredRequest(sent_s=0.0, prompt_tokens=9, status=200, error="timeout: no whole answer in 120 s")
    with_refused = MeasuredRun(name="r", requests=(*last.requests, refused), started="2026")
    with_lost = MeasuredRun(name="r", requests=(*last.requests, lost), started="2026")
    expected = calibrate([*others, last], BASE, "mine")
    calibration = calibrate([*others, with_refused], BASE, "mine")
    assert (calibration.figures, calibration.gaps) == (expected.figures, expected.gaps)
    assert calibration.warnings == ("r: 1 requests failed, and what they cost the engine is not known",)
    assert calibrate([*others, with_lost], BASE, "mine").gaps == calibrate(others, BASE, "mine").gaps


def test_a_linear_model_that_does_not_hold():
    """A warning with the error."""
    requests = low_rates()
    slow = msgspec.structs.replace(TIMING, step_us=20000.0)
    runs = [*runs_of(requests), *runs_of(requests, timing=slow)]
    warnings = calibrate(runs, BASE, "mine").warnings
    assert any(each.startswith("the gaps between tokens are off by ") for each in warnings)


@pytest.mark.parametrize(
    ("each_traffic", "kept", "reason"),
    [
        (
            [[(2.0 * index, length, 64) for index in range(12)] for length in (512, 4096, 16384)],
            "sequence_us",
            "only batches of 1 were measured",
        ),
        (
            [traffic(1.0, 20, 512), traffic(1.0, 20, 8192, seed=1), traffic(8.0, 60, 512, seed=3)],
            "prompt_pair_ps",
            "only two prompt lengths were measured",
        ),
    ],
)
def test_a_figure_that_the_runs_cannot_tell(each_traffic, kept, reason):
    """It stays as in the base, the others are fitted beside it, and warning and source say so."""
    base = msgspec.structs.replace(BASE, timing=msgspec.structs.replace(BASE.timing, **{kept: getattr(TIMING, kept)}))
    calibration = calibrate(runs_of(each_traffic), base, "mine")
    assert max(errors_of(calibration).values()) < 0.01
    assert calibration.warnings == (f"{kept} is the base profile's: {reason}",)
    [figure] = [each for each in calibration.figures if each.kept_because]
    assert (figure.name, figure.fitted, figure.standard_error) == (kept, figure.base, None)
    source = calibration.profile.sources[f"timing.{kept}"]
    assert source == f"profile {BASE.name}, since {reason}: {BASE.sources[f'timing.{kept}']}"


def test_contexts_of_one_length():
    """Their cost stays as in the base."""
    # Answers of four tokens have too few gaps to be looked at; those to 512 tokens are what is left.
    each = [traffic(1.0, 30, length, outputs=64 if length == 512 else 4, seed=length) for length in (512, 4096, 16384)]
    calibration = calibrate(runs_of(each), BASE, "mine")
    assert "context_token_ns is the base profile's: only contexts of one length were measured" in calibration.warnings
    assert calibration.profile.timing.context_token_ns == BASE.timing.context_token_ns


def test_a_cost_that_is_not_there_is_0():
    """And not below; a warning names it."""
    free = msgspec.structs.replace(TIMING, context_token_ns=0.0, prompt_pair_ps=0.0)
    runs = runs_of(low_rates(), timing=free, noise=Noise(jitter_ms=0.2))
    faster = [_with_shorter_gaps(run, 2e-6) for run in runs]
    calibration = calibrate(faster, BASE, "mine")
    assert calibration.profile.timing.context_token_ns == 0
    assert calibration.profile.timing.step_us == pytest.approx(TIMING.step_us, rel=0.01)
    assert "context_token_ns came out at 0: the runs do not show it" in calibration.warnings


def _with_shorter_gaps(run, ms_per_prompt_token):
    """An engine that is quicker with longer contexts, which none is."""
    requests = [
        msgspec.structs.replace(each, itl_ms=[gap - ms_per_prompt_token * each.prompt_tokens for gap in each.itl_ms])
        for each in run.requests
    ]
    return dataclasses.replace(run, requests=tuple(requests))


@pytest.mark.parametrize(
    ("each_traffic", "message"),
    [
        ([], "too few gaps between tokens (0) that no prefill disturbed: run `kvberth bench` with a lower --rate"),
        ([traffic(50.0, 100, 4096, outputs=4)], "that no prefill disturbed: run `kvberth bench` with a lower --rate"),
        ([traffic(1000.0, 20, 512)], "too few requests (0) were alone in their prefill: run `kvberth bench`"),
        ([[(5.0 * at, 512 * 4**at, 128) for at in range(3)]], "too few requests (3) were alone in their prefill"),
        (
            [traffic(1.0, 20, 1024)],
            "prompts of one length (1024) cannot tell the time per token from the time per request: "
            "run `kvberth bench --prompt-tokens 8192 --rate 0.5` too",
        ),
        ([traffic(0.05, 20, 100_000)], "run `kvberth bench --prompt-tokens 12500 --rate 0.5` too"),
    ],
)
def test_runs_that_cannot_tell_enough(each_traffic, message):
    """Refused, with the run that would help."""
    with pytest.raises(EmulatorError) as refusal:
        calibrate(runs_of(each_traffic) or [MeasuredRun(name="empty", requests=())], BASE, "mine")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "batched_tokens", "message"),
    [
        ("my model", None, "name: 'my model' must be of letters, digits, "),
        ("../x", None, "name: '../x' must be of letters, digits, "),
        ("small", None, "name: small comes with kvberth; take another one, such as small-measured"),
        ("mine", 0, "batched_tokens: must be 1 or more, not 0"),
    ],
)
def test_settings_that_cannot_be(name, batched_tokens, message):
    """One line that names the setting."""
    with pytest.raises(EmulatorError, match="^" + message.replace(".", r"\.")):
        calibrate([], BASE, name, batched_tokens=batched_tokens)


def test_the_profile_can_be_loaded(tmp_path):
    """It comes back as it was, with all but the timing of the base, and tells where the timing comes from."""
    runs = runs_of(low_rates())
    profile = calibrate(runs, BASE, "mine").profile
    path = tmp_path / "mine.toml"
    path.write_text(dump_profile(profile))
    assert load_profile(path) == profile
    assert (profile.name, profile.model, profile.engine, profile.link) == ("mine", BASE.model, BASE.engine, BASE.link)
    assert profile.sources["link.latency_us"] == BASE.sources["link.latency_us"]
    assert profile.sources["timing.step_us"].startswith("fitted by kvberth emulator calibrate to ")
    assert "run-0 (2026-11-02T10:00:00+00:00), run-1" in profile.sources["timing.step_us"]
    assert " first tokens of the runs run-0" in profile.sources["timing.prompt_pair_ps"]
    assert "median error 0.0%" in profile.sources["timing.prompt_pair_ps"]


def test_a_base_with_one_source_for_all_its_timing():
    """A table's source does not outlive its figures."""
    profile = calibrate(runs_of(low_rates()), load_profile("small"), "mine").profile
    assert "timing" not in profile.sources


def test_runs_are_read_as_they_were_written(tmp_path):
    """Requests, date and traffic; fields that are not needed are ignored."""
    run = simulate(traffic(1.0, 5, 512), name="r1")
    read = read_run(write_run(tmp_path / "r1", run, seed=7))
    assert (read.name, read.requests, read.started) == ("r1", run.requests, run.started)
    assert read.traffic == ("http://h:1", 7)


def test_a_run_without_summary(tmp_path):
    """It was stopped; that is a warning."""
    *others, last = runs_of(low_rates())
    stopped = read_run(write_run(tmp_path / "stopped", last))
    assert (stopped.started, stopped.traffic) == (None, None)
    assert calibrate([*others, stopped], BASE, "mine").warnings == (
        "stopped has no summary: requests that had not ended when it stopped are not known",
    )


def test_runs_with_the_same_prompts(tmp_path):
    """A prefix cache would have known them the second time; shorter prompts of a seed begin its longer ones."""
    runs = [read_run(write_run(tmp_path / run.name, run, seed=0)) for run in runs_of(low_rates())]
    [warning] = calibrate(runs, BASE, "mine").warnings
    assert warning.startswith("several runs on one server have the same seed")


def test_several_tokens_per_chunk():
    """Steps cannot be told apart any more; a warning."""
    warnings = calibrate(runs_of(low_rates(), noise=Noise(merged=0.3)), BASE, "mine").warnings
    assert any(each.startswith("run-0: 1.4 tokens per chunk; ") for each in warnings)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "requests.jsonl: No such file or directory; give folders that `kvberth bench --out` has written"),
        (
            {"requests.jsonl": '{"sent_s": 1, "prompt_tokens": 1}\n{}\n'},
            "requests.jsonl:2: is no record of a request: ",
        ),
        ({"requests.jsonl": "", "summary.json": "{}"}, "summary.json: is no summary of a run: "),
    ],
)
def test_folders_that_are_no_runs(tmp_path, files, message):
    """Named with the line."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(EmulatorError) as refusal:
        read_run(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path}/{message}")
