"""What an emulated engine does by itself, with vLLM's scheduler and block tables as they are."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("engine_run.py")
LENGTHS = (5, 16, 17, 300, 1500)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(1000, 20000, length).tolist() for seed, length in enumerate(lengths)]


def run(prompts: list[list[int]], *, max_tokens: int = 20, damage: bool = False, **engine: Any) -> dict[str, Any]:
    """Answers, counters, and what the engine said on its log."""
    wanted = {"engine": engine, "prompts": prompts, "max_tokens": max_tokens, "damage": damage}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(wanted)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**result, "log": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """One engine without prefix caching, a step for each prompt."""
    return run(prompts(), enable_prefix_caching=False)


def test_an_answer_is_a_function_of_the_prompt(plain):
    """Two engines give the same answers, however small the chunks of the prompts are, and other prompts get others."""
    chunked = run(prompts(), enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=3)
    assert chunked["answers"] == plain["answers"]
    assert chunked["corruptions"] == plain["corruptions"] == 0
    assert len({tuple(answer) for answer in plain["answers"]}) == len(LENGTHS)
    assert all(len(answer) == 20 and len(set(answer)) > 10 for answer in plain["answers"])


def test_scheduling_without_running_ahead_changes_nothing(plain):
    """The engine's async scheduling is not seen in the answers."""
    assert run(prompts(), enable_prefix_caching=False, async_scheduling=False)["answers"] == plain["answers"]


def test_preempted_requests_are_computed_again(plain):
    """With too few blocks requests lose theirs in mid-answer, and still answer as if they had not."""
    lengths = (300,) * 6
    wanted = prompts(lengths)
    free = run(wanted, max_tokens=120, enable_prefix_caching=False)
    tight = run(wanted, max_tokens=120, enable_prefix_caching=False, num_gpu_blocks_override=100, max_model_len=1024)
    assert free["preemptions"] == 0
    assert tight["preemptions"] > 0
    assert tight["answers"] == free["answers"]
    assert tight["corruptions"] == 0


def test_a_damaged_word_is_found_named_and_answered_differently():
    """One bit in one cached word: counted, named with layer, block and slot, and the answer is another one."""
    result = run(prompts((320,)), damage=True, enable_prefix_caching=True)
    assert result["corruptions"] == 1
    assert result["answers_after_damage"] != result["answers"]
    place = f"layer {result['layer']}, block {result['block']}, slot {result['slot']} "
    (line,) = re.findall(r"KV corruption in request .*", result["log"])
    assert place in line
    assert "1 words are wrong" in line
    assert result["verified_tokens"] >= 304


def test_block_major_memory_is_the_same(plain, monkeypatch):
    """All layers of a block adjacent, as some attention backends have it."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    result = run(prompts(), enable_prefix_caching=True)
    assert "BLHNC" in result["log"]
    assert result["answers"] == plain["answers"]
    assert result["corruptions"] == 0


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size 4 is not emulated: it can be 1 or 2"),
        ({"enable_lora": True}, "LoRA is not emulated"),
        ({"additional_config": {"kvberth_emulator": {"lnk": True}}}, "the settings are link, nixl_progress_delay_us"),
    ],
)
def test_what_is_not_emulated_is_refused_by_name(engine, reason):
    """Before anything is allocated, with what would be right."""
    wanted = {"engine": engine, "prompts": [[1]], "max_tokens": 1}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(wanted)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    assert reason in done.stderr + done.stdout
