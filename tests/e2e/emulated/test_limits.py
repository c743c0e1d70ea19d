"""A decode worker with less room than the prefill worker, and with vLLM's policy to fail what could not be loaded."""

import json
import time

import pytest
from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually
from tests.e2e.emulated.test_cluster import MODEL, prompts, settings
from tests.e2e.legs import Legs

from kvberth.launch import LocalCluster

ROOM = 2048


@pytest.fixture
def cluster(pool) -> LocalCluster:
    """Leases longer than any test."""
    strict = {
        "kv_connector": "KVBerthConnector",
        "kv_connector_module_path": "kvberth.vllm_plugin",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
    }
    return pool.get(
        settings(
            authenticate=False,  # the decode worker's configuration is our own, and has no key
            connector_config={"lease_seconds": 300},
            decode_args=("--max-model-len", str(ROOM), "--kv-transfer-config", json.dumps(strict)),
        )
    )


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_prompt_that_the_decode_worker_can_never_hold(cluster, mode):
    """Refused at once, with both numbers; the prefill worker, which could hold it, keeps nothing."""
    (prompt,) = prompts([2500])
    began = time.monotonic()
    body = {"prompt": prompt, "max_tokens": 8}
    answer = Client(cluster.router_url, MODEL).post("/v1/completions", body, {"x-kvberth-mode": mode})
    assert answer.status_code == 400
    assert str(ROOM) in answer.json()["error"]["message"]
    assert "2500" in answer.json()["error"]["message"]
    assert time.monotonic() - began < 5
    assert_nothing_left(cluster)


def test_failed_transfer_fails_the_request_where_that_is_the_policy(cluster):
    """No prefill ever comes: D answers with an error, holds nothing, and serves the next one."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    (prompt,) = prompts([2000])
    with Legs(MODEL, prefill) as legs:
        bound = legs.decode(decode, prompt, "nobody prefills this")
        eventually(lambda: Metrics(decode.url).value("vllm:kv_cache_usage_perc") > 0, 10, "D waits")
        assert "Internal server error" in str(bound.exception()), bound.exception()
        failed = {"end": "failed", "reason": "prefill_never_came"}
        eventually(lambda: Metrics(decode.url).transfers(**failed) == 1, 5, "it is counted")
        assert legs.in_turn(decode, prompt, "the next one")["kv_transfer_params"]["transfer"]["ok"]
    assert_nothing_left(cluster)
