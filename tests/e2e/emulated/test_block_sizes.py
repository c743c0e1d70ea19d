"""Emulated engines whose blocks differ in size: every word of the prompt is verified where it arrives."""

import itertools
from typing import Any

import numpy as np
import pytest
from tests.e2e.client import Client, assert_nothing_left
from tests.e2e.conftest import decode_worker_beside
from tests.e2e.emulated.test_cluster import MODEL, counter, settings

from kvberth.launch.metrics import EngineMetrics

LENGTHS = (5, 31, 64, 100, 2500)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 64), (64, 16)])
def test_blocks_of_another_size(pool, tmp_path, prefill_size, decode_size):
    """Streamed and pulled, without and with a prefix of the decode worker's own."""
    cluster = pool.get(settings(block_size=prefill_size, prefix_caching=True))
    prefill = Client(cluster.prefill[0].url, MODEL)
    names = itertools.count()
    with decode_worker_beside(cluster, tmp_path, block_size=decode_size) as other:
        decode = Client(other.url, MODEL)

        def answer(prompt: list[int], mode: str) -> dict[str, Any]:
            """Of a sequential router."""
            body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True}
            to_prefill = {"do_remote_decode": True, "transfer_id": f"t-{next(names)}", "transfer_mode": mode}
            told = prefill.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": to_prefill}).json()
            params = told["kv_transfer_params"]
            return dict(decode.post("/v1/completions", {**body, "max_tokens": 8, "kv_transfer_params": params}).json())

        for mode, length in itertools.product(("push", "pull"), LENGTHS):
            prompt = np.random.default_rng(next(names)).integers(1000, 20000, length).tolist()
            for turn in (prompt, prompt + prompt[: length // 2 + 1]):
                told = answer(turn, mode)
                assert told["kv_transfer_params"]["transfer"]["ok"], told
                assert told["choices"][0]["text"] == prefill.complete(turn, max_tokens=8)
        metrics = EngineMetrics(other.url)
        assert metrics.value("kvberth:emulator_verified_tokens_total") > 2 * sum(LENGTHS)
        assert metrics.value("kvberth:emulator_corruptions_total") == 0
        assert counter(cluster, "corruptions", "prefill") == 0
        assert_nothing_left(cluster)
