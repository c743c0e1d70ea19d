"""The real model's KV flows while the prompt is read, whatever comes between; the answer stays that of one engine."""

import time
from dataclasses import replace
from typing import Any

import pytest
from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually, prompt_of
from tests.e2e.conftest import MODEL
from tests.e2e.legs import Legs, told

from kvberth.launch import LocalCluster

TOKENS, CHUNK, BLOCK = 2000, 256, 32
BLOCKS = -(-TOKENS // BLOCK)


@pytest.fixture
def cluster(pool, settings) -> LocalCluster:
    """Two decode workers; a prefill worker with little memory, which takes in prompts that do not fit beside others."""
    few_blocks = ("--num-gpu-blocks-override", "84", "--no-scheduler-reserve-full-isl")
    return pool.get(
        replace(
            settings,
            decode=2,
            max_model_len=2560,
            engine_args=(*settings.engine_args, "--max-num-batched-tokens", str(CHUNK)),
            prefill_args=few_blocks,
        )
    )


@pytest.fixture
def legs(cluster):
    with Legs(MODEL, cluster.prefill[0]) as legs:
        yield legs
    assert_nothing_left(cluster)


def texts(*answers: dict[str, Any]) -> list[str]:
    return [str(answer["choices"][0]["text"]) for answer in answers]


def test_parts_are_written_behind_each_chunk(cluster, legs, undivided: Client):
    """2,000 tokens in chunks of 256: seven of the eight parts are on their way before the prompt has been read."""
    prompt = prompt_of(undivided.tokens(), TOKENS, 600)
    bound = legs.decode(cluster.decode[0], prompt, "streamed")
    legs.prefill(prompt, "streamed").result()
    assert texts(bound.result()) == [undivided.complete(prompt)]
    timeline = told(bound.result())["timeline"]
    early = [blocks for moment, blocks in timeline["writes"] if moment < timeline["prefill_done"] - 0.001]
    assert early == [CHUNK // BLOCK] * (TOKENS // CHUNK)
    assert sum(blocks for _, blocks in timeline["writes"]) == BLOCKS
    assert timeline["registered"] < timeline["moving"] < timeline["prefill_done"] < timeline["ended"]


def test_preempted_prefill_is_sent_again(cluster, legs, undivided: Client):
    """Another request's tokens take the memory in mid-prefill; the blocks change hands, the answer does not."""
    prefill = cluster.prefill[0]
    prompt, other = (prompt_of(undivided.tokens(), length, 610 + length) for length in (TOKENS, 850))
    preemptions = Metrics(prefill.url).value("vllm:num_preemptions_total")
    crowd = legs.start(prefill, other, max_tokens=100)
    eventually(lambda: Metrics(prefill.url).value("vllm:num_requests_running") == 1, 20, "the other one runs")
    bound = legs.decode(cluster.decode[0], prompt, "preempted")
    legs.prefill(prompt, "preempted").result()
    assert texts(bound.result()) == [undivided.complete(prompt)]
    assert told(bound.result())["ok"]
    assert texts(crowd.result()) == [undivided.complete(other, max_tokens=100)]
    assert Metrics(prefill.url).value("vllm:num_preemptions_total") > preemptions


def test_decode_worker_that_has_a_prefix_gets_the_rest(cluster, legs, undivided: Client):
    """It computed the first half for somebody else; only the blocks behind that are written."""
    prompt = prompt_of(undivided.tokens(), TOKENS, 630)
    legs.ask(cluster.decode[0], prompt[:1000], max_tokens=1)
    bound = legs.decode(cluster.decode[0], prompt, "tail")
    legs.prefill(prompt, "tail").result()
    assert texts(bound.result()) == [undivided.complete(prompt)]
    writes = told(bound.result())["timeline"]["writes"]
    assert sum(blocks for _, blocks in writes) == BLOCKS - 1000 // BLOCK
    assert len(writes) > 1


def test_decode_worker_is_chosen_again_in_mid_prefill(cluster, legs, undivided: Client):
    """The second gets everything, the first is told and computes for itself."""
    prompt = prompt_of(undivided.tokens(), TOKENS, 640)
    first = legs.decode(cluster.decode[0], prompt, "twice", attempt=0)
    legs.prefill(prompt, "twice")
    time.sleep(0.8)
    second = legs.decode(cluster.decode[1], prompt, "twice", attempt=1)
    assert texts(first.result(), second.result()) == [undivided.complete(prompt)] * 2
    assert told(first.result())["reason"] == "newer_attempt"
    assert told(second.result())["ok"]
    assert sum(blocks for _, blocks in told(second.result())["timeline"]["writes"]) == BLOCKS


def test_decode_worker_that_comes_late_gets_all_at_once(cluster, legs, undivided: Client):
    """It registers when the prompt has been read: one part, and no wait for the prefill."""
    prompt = prompt_of(undivided.tokens(), TOKENS, 650)
    answer = legs.in_turn(cluster.decode[0], prompt, "late", transfer_mode="push")
    assert texts(answer) == [undivided.complete(prompt)]
    timeline = told(answer)["timeline"]
    assert timeline["prefill_done"] < 0
    assert [blocks for _, blocks in timeline["writes"]] == [BLOCKS]
