"""Emulated engines apart: every connector hands over what the undivided engine would have computed, bit by bit."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.e2e.client import Client
from tests.e2e.conftest import ClusterPool

from kvberth.launch import ClusterSettings, Connector, LocalCluster
from kvberth.launch.metrics import EngineMetrics

MODEL = "small"
LENGTHS = (5, 16, 31, 32, 33, 300, 2500, 6000)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(1000, 20000, length).tolist() for seed, length in enumerate(lengths)]


def settings(**changes: object) -> ClusterSettings:
    """One prefill and one decode worker, chunks of 1,000 tokens."""
    common = {
        "model": MODEL,
        "emulate": True,
        "prefix_caching": False,
        "engine_args": ("--max-num-batched-tokens", "1000"),
    }
    return ClusterSettings(**(common | changes))  # type: ignore[arg-type]


def counter(cluster: LocalCluster, name: str, engines: str = "decode", rank: int = 0) -> float:
    """The sum of an emulator's counter over engines of one kind."""
    return sum(
        EngineMetrics(engine.url).value(f"kvberth:emulator_{name}_total", rank=str(rank))
        for engine in getattr(cluster, engines)
    )


@pytest.fixture(scope="module")
def expected(pool: ClusterPool) -> list[str]:
    """What an undivided engine answers."""
    cluster = pool.get(settings(prefill=0, decode=0, undivided=1))
    client = Client(cluster.undivided[0].url, MODEL)
    return [client.complete(prompt) for prompt in prompts()]


CONNECTORS = {
    "kvberth": {"connector": Connector.KVBERTH, "mode": "push"},
    "kvberth with the link": {"connector": Connector.KVBERTH, "mode": "push", "emulate_link": True},
    "vllm pull": {"connector": Connector.VLLM, "mode": "pull"},
    "vllm push": {"connector": Connector.VLLM, "mode": "push"},
    "vllm push with the link": {"connector": Connector.VLLM, "mode": "push", "emulate_link": True},
    "two ranks": {
        "connector": Connector.KVBERTH,
        "mode": "push",
        "engine_args": ("--max-num-batched-tokens", "1000", "--tensor-parallel-size", "2"),
    },
}


@pytest.mark.parametrize("name", CONNECTORS)
def test_answers_are_those_of_one_engine(pool, expected, name):
    """Alone and eight at once, in each mode that the connector has; all words verified, none wrong."""
    kind = CONNECTORS[name]
    cluster = pool.get(settings(**kind))
    router = Client(cluster.router_url, MODEL)
    modes = ["push", "pull"] if kind["connector"] is Connector.KVBERTH else [str(kind["mode"])]
    for mode in modes:
        verified = counter(cluster, "verified_tokens")
        assert [router.complete(prompt, mode) for prompt in prompts()] == expected
        assert router.complete_all(prompts(), mode, num_threads=8) == expected
        # All but each prompt's last token, which the decode worker computes, came from elsewhere.
        assert counter(cluster, "verified_tokens") - verified == 2 * sum(length - 1 for length in LENGTHS)
    ranks = 2 if name == "two ranks" else 1
    for rank in range(ranks):
        for engines in ("prefill", "decode"):
            assert counter(cluster, "corruptions", engines, rank) == 0


def test_probabilities_are_refused(pool):
    """A client's mistake is answered with 400 and says why."""
    cluster = pool.get(settings(prefill=0, decode=0, undivided=1))
    answer = Client(cluster.undivided[0].url, MODEL).post(
        "/v1/completions", {"prompt": "A berth", "max_tokens": 1, "logprobs": 1}
    )
    assert answer.status_code == 400
    assert "an emulated engine computes no probabilities" in answer.text


def test_a_conversation_hits_the_prefix_cache(pool):
    """An answer encodes back to its own tokens, so the next turn finds them cached, as with a real model."""
    cluster = pool.get(settings(prefill=0, decode=0, undivided=1, prefix_caching=True))
    client = Client(cluster.undivided[0].url, MODEL)
    messages = [{"role": "user", "content": "Where does the ship lie? " * 8}]
    first = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 64, "ignore_eos": True}).json()
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "And the next one?"})
    verified = counter(cluster, "verified_tokens", "undivided")
    second = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4}).json()
    cached = counter(cluster, "verified_tokens", "undivided") - verified
    turn = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert turn - 32 <= cached <= second["usage"]["prompt_tokens"]
    assert counter(cluster, "corruptions", "undivided") == 0
