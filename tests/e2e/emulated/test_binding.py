"""Decode workers chosen early, just in time and late, with real engines behind the router."""

from statistics import median

import httpx
import numpy as np
from tests.e2e.client import Client, assert_nothing_left, eventually
from tests.e2e.emulated.test_cluster import MODEL, counter, settings

from kvberth.launch.metrics import EngineMetrics

TOKENS, CHUNK, COUNT = 12000, 128, 6
"""A prompt is read in 94 steps, which take about 430 ms."""


def test_just_in_time_reserves_memory_for_a_moment_only(pool):
    """The same answers; the decode worker's blocks wait for a part of the prefill and not for all of it."""
    cluster = pool.get(settings(engine_args=("--max-num-batched-tokens", str(CHUNK))))
    decode = EngineMetrics(cluster.decode[0].url)
    client = Client(cluster.router_url, MODEL)
    prompts = [np.random.default_rng(90 + number).integers(1000, 20000, TOKENS).tolist() for number in range(COUNT)]
    texts: dict[str, list[str]] = {}
    reserved: dict[str, float] = {}

    def ask(prompt: list[int], binding: str) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer: httpx.Response = client.post("/v1/completions", body, {"x-kvberth-binding": binding})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvberth-binding"] == binding
        return str(answer.json()["choices"][0]["text"])

    def ended() -> float:
        return decode.value("kvberth:transfers_total", end="completed", reason="none")

    number = int(ended())
    for binding in ("jit", "early", "jit", "late"):  # the first teaches the router how fast the prefill worker is
        texts[binding], of_each = [], []
        for prompt in prompts:
            before = decode.value("kvberth:reserved_block_seconds_total")
            texts[binding].append(ask(prompt, binding))
            number += 1
            eventually(lambda asked=number: ended() == asked, 5, "it is counted")
            of_each.append(decode.value("kvberth:reserved_block_seconds_total") - before)
        reserved[binding] = median(of_each)  # a machine that stands still for a moment spoils one
    assert texts["early"] == texts["jit"] == texts["late"]
    assert reserved["late"] < reserved["jit"] < 0.6 * reserved["early"]
    assert counter(cluster, "corruptions") == 0
    assert_nothing_left(cluster)
