"""A decode worker that is chosen again in mid-prefill, with real engines; the legs are sent by hand."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tests.e2e.conftest import ClusterPool
from tests.e2e.emulated.test_cluster import MODEL, counter, settings

from kvberth.launch import LocalCluster
from kvberth.launch.engine import EngineProcess
from kvberth.router.engines import Role, parse_engine_info

PROMPT = np.random.default_rng(7).integers(1000, 20000, 12000).tolist()
CHUNK = 128


@pytest.fixture
def cluster(pool: ClusterPool) -> LocalCluster:
    """Two decode workers; a prompt is read in 94 steps, which take about 430 ms."""
    return pool.get(settings(decode=2, engine_args=("--max-num-batched-tokens", str(CHUNK))))


def ask(engine: EngineProcess, params: dict[str, Any] | None, max_tokens: int = 16) -> dict[str, Any]:
    """One leg."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    if params is not None:
        body["kv_transfer_params"] = params
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_second_decode_worker_gets_it_all(cluster):
    """The first one is superseded and computes for itself; both give the right answer, and no word is wrong."""
    prefill, (first, second) = cluster.prefill[0], cluster.decode
    producer = parse_engine_info(httpx.get(f"{prefill.url}/metrics", timeout=10).text, Role.PREFILL)
    transfer_id = str(uuid.uuid4())
    common = {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": producer.engine_id,
        "remote_host": producer.control_host,
        "remote_port": producer.control_port,
        "tp_size": 1,
    }
    expected = ask(second, None)["choices"][0]["text"]
    verified = counter(cluster, "verified_tokens")
    with ThreadPoolExecutor(3) as threads:
        legs = [threads.submit(ask, first, common | {"attempt": 0})]
        time.sleep(0.2)
        legs.append(threads.submit(ask, prefill, {"do_remote_decode": True, "transfer_id": transfer_id}, 1))
        time.sleep(0.15)
        legs.append(threads.submit(ask, second, common | {"attempt": 1}))
        superseded, prefilled, bound = [leg.result() for leg in legs]
    assert bound["choices"][0]["text"] == superseded["choices"][0]["text"] == expected
    assert bound["kv_transfer_params"]["transfer"]["ok"]
    assert superseded["kv_transfer_params"]["transfer"]["reason"] == "newer_attempt"
    assert prefilled["kv_transfer_params"]["transfer_id"] == transfer_id
    assert counter(cluster, "verified_tokens") - verified == len(PROMPT) - 1
    assert counter(cluster, "corruptions") == 0
