"""Kinds of faults from the field that take whole engines to show; docs/design/faults.md has the map."""

import signal
import time

import pytest
from tests.e2e.client import Metrics, assert_nothing_left, eventually
from tests.e2e.emulated.test_cluster import MODEL, counter, prompts, settings
from tests.e2e.legs import Legs, told

from kvberth.launch import LocalCluster

LEASE_SECONDS = 2.0


@pytest.fixture
def cluster(pool) -> LocalCluster:
    """Two prefill workers with short leases; a decode worker with memory for three prompts, but not their answers."""
    return pool.get(
        settings(
            prefill=2,
            connector_config={"lease_seconds": LEASE_SECONDS},
            decode_args=("--max-model-len", "4096", "--num-gpu-blocks-override", "300"),
        )
    )


@pytest.fixture
def legs(cluster):
    with Legs(MODEL, cluster.prefill[0]) as legs:
        yield legs
    assert_nothing_left(cluster)
    assert counter(cluster, "corruptions") == counter(cluster, "corruptions", "prefill") == 0


def test_lease_ends_on_an_idle_engine_and_who_comes_later_is_told(cluster, legs):
    """Nothing else happens there that could clean up; the decode worker computes for itself."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    (prompt,) = prompts([1000])
    params = legs.prefill(prompt, "expired").result()["kv_transfer_params"]
    assert Metrics(prefill.url).value("vllm:kv_cache_usage_perc") > 0
    eventually(lambda: Metrics(prefill.url).value("vllm:kv_cache_usage_perc") == 0, LEASE_SECONDS + 2, "P is empty")
    answer = legs.ask(decode, prompt, params)
    assert told(answer)["reason"] == "lease_expired"
    assert answer["choices"][0]["text"] == legs.ask(prefill, prompt)["choices"][0]["text"]


def test_prompt_whose_first_token_ends_the_answer_is_handed_over(cluster, legs):
    """P's only token stops its answer, as an end of sequence does: its KV is as good as any other."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    (prompt,) = prompts([1003])
    expected = legs.ask(prefill, prompt, fields={"return_token_ids": True})["choices"][0]
    stops = {"stop_token_ids": expected["token_ids"][:1]}
    prefilled = legs.prefill(prompt, "stopped", fields=stops).result()
    assert prefilled["choices"][0]["finish_reason"] == "stop"
    answer = legs.ask(decode, prompt, prefilled["kv_transfer_params"])
    assert told(answer)["ok"]
    assert answer["choices"][0]["text"] == expected["text"]


def test_second_request_of_the_same_name_computes_for_itself(cluster, legs):
    """As with clients that send one `X-Request-Id` for all they ask, and a router that knows no transfer ids."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    first, second = prompts([700, 900])
    assert told(legs.in_turn(decode, first, "same name"))["ok"]
    answer = legs.in_turn(decode, second, "same name")
    assert told(answer)["reason"] == "id_reused"
    assert answer["choices"][0]["text"] == legs.ask(prefill, second)["choices"][0]["text"]


def test_preempted_decode_worker_asks_nobody_again(cluster, legs):
    """Its memory runs out in the middle of three answers; what it has lost it computes anew."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    three = prompts([1300, 1301, 1302])
    expected = [legs.ask(prefill, prompt, max_tokens=400)["choices"][0]["text"] for prompt in three]
    preemptions = Metrics(decode.url).value("vllm:num_preemptions_total")
    bound = [legs.decode(decode, prompt, f"crowd-{len(prompt)}", max_tokens=400) for prompt in three]
    for prompt in three:
        legs.prefill(prompt, f"crowd-{len(prompt)}")
    assert [leg.result()["choices"][0]["text"] for leg in bound] == expected
    assert all(told(leg.result())["ok"] for leg in bound)
    assert Metrics(decode.url).value("vllm:num_preemptions_total") > preemptions


def test_hanging_prefill_worker_holds_up_nobody_else(cluster, legs):
    """While one is silent, the other one's handoffs go on; what waits for the silent one ends in time."""
    silent, decode = cluster.prefill[0], cluster.decode[0]
    waits, goes_on = prompts([800, 810])
    with Legs(MODEL, cluster.prefill[1]) as others:
        silent.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            bound = legs.decode(decode, waits, "silent")
            for number in range(5):
                assert told(others.in_turn(decode, goes_on, f"beside-{number}"))["ok"]
            assert time.monotonic() - began < 3
            answer = bound.result()
            assert time.monotonic() - began < 10
        finally:
            silent.signal(signal.SIGCONT)
        assert told(answer)["reason"] in {"peer_lost", "peer_unreachable"}
        assert answer["choices"][0]["text"] == others.ask(cluster.prefill[1], waits)["choices"][0]["text"]
    eventually(silent.is_ready, 10, "it is back")
