"""Engines that are killed while requests stand in every phase, and clients that leave whenever they like."""

import asyncio
import signal
import time
from collections.abc import Sequence

import httpx
import numpy as np
import psutil
import pytest
from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually, wait_until_dispatched
from tests.e2e.emulated.test_cluster import MODEL, counter, settings
from tests.e2e.legs import Legs, told

from kvberth.launch import LocalCluster
from kvberth.launch.engine import EngineProcess

TOKENS, CHUNK = 12000, 128
"""A prompt is read in 94 steps, which take about 430 ms."""

BOUND_SECONDS = 5.0


def prompt(seed: int, length: int = TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 20000, length).tolist()


@pytest.fixture
def cluster(pool) -> LocalCluster:
    """Leases longer than any test, so that what is free has not merely expired."""
    return pool.get(
        settings(
            engine_args=("--max-num-batched-tokens", str(CHUNK)),
            connector_config={"lease_seconds": 300},
            prefill_args=("--shutdown-timeout", "20"),
        )
    )


def start_again(engine: EngineProcess) -> None:
    """At the same address."""
    engine.start()
    eventually(engine.is_ready, 300, f"{engine.name} is back")


def await_reservations(decode: EngineProcess, count: int) -> None:
    """Until so many prompts have their blocks, and a moment more for the registrations."""
    share = 0.99 * count * TOKENS / 65536
    eventually(lambda: Metrics(decode.url).value("vllm:kv_cache_usage_perc") > share, 20, f"{count} are reserved")
    time.sleep(0.2)


def assert_serves_at_once(cluster: LocalCluster, expected: str, transfer_id: str) -> None:
    """The first handoff with a peer that is back already works."""
    with Legs(MODEL, cluster.prefill[0]) as legs:
        bound = legs.decode(cluster.decode[0], prompt(1), transfer_id)
        legs.prefill(prompt(1), transfer_id)
        assert told(bound.result())["ok"], bound.result()
        assert bound.result()["choices"][0]["text"] == expected
    assert_nothing_left(cluster)
    assert counter(cluster, "corruptions") == 0


def test_killed_prefill_worker(cluster):
    """In all phases at once: decoding, in mid-prefill, queued, not arrived, to be pulled; all answers are right."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    with Legs(MODEL, prefill) as legs:
        expected = [legs.ask(decode, prompt(seed))["choices"][0]["text"] for seed in range(5)]
        decoding = legs.decode(decode, prompt(0), "decoding", max_tokens=400)
        legs.prefill(prompt(0), "decoding").result()
        waiting = {
            "streaming": legs.decode(decode, prompt(1), "streaming"),
            "queued": legs.decode(decode, prompt(2), "queued"),
            "never arrived": legs.decode(decode, prompt(3), "never arrived"),
            "pulled": legs.decode(decode, prompt(4), "pulled", transfer_mode="pull"),
        }
        await_reservations(decode, 5)
        for seed, name in ((1, "streaming"), (2, "queued"), (4, "pulled")):
            legs.prefill(prompt(seed), name)
        time.sleep(0.3)
        prefill.kill()
        killed = time.monotonic()
        for answer, text in zip(waiting.values(), expected[1:], strict=True):
            assert answer.result()["choices"][0]["text"] == text
        assert time.monotonic() - killed < BOUND_SECONDS
        assert decoding.result()["choices"][0]["text"].startswith(expected[0])
        assert told(decoding.result())["ok"]
        assert {name: told(answer.result())["reason"] for name, answer in waiting.items()} == dict.fromkeys(
            waiting, "peer_lost"
        )
        late = legs.decode(decode, prompt(0), "too late").result()
        assert told(late)["reason"] == "peer_unreachable"
        assert late["seconds"] < BOUND_SECONDS
        eventually(lambda: Metrics(decode.url).value("vllm:kv_cache_usage_perc") == 0, BOUND_SECONDS, "D is empty")
    start_again(prefill)
    assert_serves_at_once(cluster, expected[1], "after P")


def test_killed_decode_worker(cluster):
    """In all phases at once; P ends each transfer, frees every block, and serves on."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    with Legs(MODEL, prefill) as legs:
        expected = legs.ask(decode, prompt(1))["choices"][0]["text"]
        legs.decode(decode, prompt(0), "decoding", max_tokens=4000)
        legs.prefill(prompt(0), "decoding").result()
        doomed = [
            legs.decode(decode, prompt(seed), name, transfer_mode=mode)
            for seed, name, mode in ((1, "streaming", "push"), (2, "queued", "push"), (3, "pulled", "pull"))
        ]
        await_reservations(decode, 4)
        prefills = [legs.prefill(prompt(seed), name) for seed, name in ((1, "streaming"), (2, "queued"), (3, "pulled"))]
        time.sleep(0.3)
        decode.kill()
        for leg in prefills:
            leg.result()
        finished = time.monotonic()
        metrics = Metrics(prefill.url)
        eventually(lambda: metrics.value("vllm:kv_cache_usage_perc") == 0, BOUND_SECONDS, "P is empty")
        assert time.monotonic() - finished < BOUND_SECONDS
        # Who was written to is missed by the transport itself, the others by their connection.
        lost = [metrics.value("kvberth:transfers_total", reason=reason) for reason in ("peer_lost", "transport")]
        assert sum(lost) == 3
        assert metrics.value("kvberth:leased_blocks") == 0
        assert all(isinstance(leg.exception(), httpx.HTTPError) for leg in doomed)
        assert legs.ask(prefill, prompt(1))["choices"][0]["text"] == expected
    start_again(decode)
    assert_serves_at_once(cluster, expected, "after D")


def test_prefill_worker_that_is_told_to_end_finishes_its_handoffs(cluster):
    """SIGTERM in mid-prefill, with vLLM's `--shutdown-timeout`: what it has begun arrives whole; then it is gone."""
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    with Legs(MODEL, prefill) as legs:
        expected = legs.ask(decode, prompt(1))["choices"][0]["text"]
        bound = legs.decode(decode, prompt(1), "drained")
        asked = legs.prefill(prompt(1), "drained")
        running = Metrics(prefill.url)
        eventually(lambda: asked.done() or running.value("vllm:num_requests_running") > 0, 20, "P has begun")
        psutil.Process(prefill.pid).send_signal(signal.SIGTERM)
        assert bound.result()["choices"][0]["text"] == expected
        assert told(bound.result())["ok"]
        assert asked.result()["kv_transfer_params"]["transfer_id"] == legs.transfer_id("drained")
        eventually(lambda: not prefill.is_alive, 10, "P has ended")
    start_again(prefill)
    assert_serves_at_once(cluster, expected, "after the drain")


async def send_and_leave(url: str, prompts: Sequence[Sequence[int]], seed: int) -> list[str | None]:
    """Each prompt by a client of its own, 16 at once, every other of which leaves within a second.

    Returns:
        What those that stayed were told.
    """
    chance = np.random.default_rng(seed)
    places = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, tokens: Sequence[int], mode: str, patience: float) -> str | None:
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        async with places:
            try:
                async with asyncio.timeout(patience):
                    answer = await client.post("/v1/completions", json=body, headers={"x-kvberth-mode": mode})
            except TimeoutError:
                return None
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        clients = [
            one(client, tokens, str(chance.choice(["push", "pull"])), 60 if chance.random() < 0.5 else chance.random())
            for tokens in prompts
        ]
        return list(await asyncio.gather(*clients))


def test_clients_that_leave_at_any_moment(cluster):
    """200 requests, many of which are given up in some phase: nothing is held 5 s later, and the rest is right."""
    chance = np.random.default_rng(5)
    prompts = [prompt(1000 + number % 10, int(chance.choice([100, 1000, 3000]))) for number in range(200)]
    texts = asyncio.run(send_and_leave(cluster.router_url, prompts, seed=6))
    stayed = [(tokens, text) for tokens, text in zip(prompts, texts, strict=True) if text is not None]
    assert 60 < len(stayed) < 180
    assert_nothing_left(cluster, BOUND_SECONDS)
    assert Metrics(cluster.prefill[0].url).value("kvberth:leased_blocks") == 0
    for engines in ("prefill", "decode"):
        assert counter(cluster, "corruptions", engines) == 0
    wait_until_dispatched(cluster, "decode", 0)
    router = Client(cluster.router_url, MODEL)
    right = {(tokens[0], len(tokens)): router.complete(tokens, max_tokens=8) for tokens, _ in stayed}
    assert all(text == right[tokens[0], len(tokens)] for tokens, text in stayed)
