"""How the tests speak to engines and router: plain HTTP, and the engines' own metrics."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from kvberth.launch import LocalCluster
from kvberth.launch.metrics import EngineMetrics

TEXT = (
    "The harbour master keeps a book of every ship that is still at sea, with the day on which it is expected, the "
    "length of its keel and the depth of water that it needs. Long before a mast is seen from the tower a place at "
    "the quay has been cleared, the lines lie ready and the cranes have been moved. When the ship comes in at last "
    "there is nothing left to do but to make fast and to open the hatches. In other harbours a ship drops anchor in "
    "the roads, a boat goes out to ask what it carries, the boat comes back, a place is looked for, and all that time "
    "the cargo waits. Old captains say that one can tell the two kinds of harbour apart by the number of gulls in the "
    "rigging. "
)


@dataclass(frozen=True)
class Client:
    """One server with one model."""

    url: str
    model: str

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        """A request with the model's name filled in."""
        return httpx.post(f"{self.url}{path}", json={"model": self.model, **body}, headers=headers, timeout=300)

    def complete(self, prompt: Sequence[int] | str, mode: str | None = None, max_tokens: int = 16) -> str:
        """The greedy continuation."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", body, {"x-kvberth-mode": mode} if mode else None)
        assert answer.status_code == 200, answer.text
        if mode is not None:
            assert answer.headers["x-kvberth-path"] == mode
        return str(answer.json()["choices"][0]["text"])

    def complete_all(self, prompts: Iterable[Sequence[int]], mode: str | None, num_threads: int) -> list[str]:
        """So many at once."""
        with ThreadPoolExecutor(num_threads) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, mode), prompts))

    @cache  # noqa: B019 - a handful of clients in one test run
    def tokens(self) -> list[int]:
        """A long text's token ids."""
        answer = self.post("/tokenize", {"prompt": TEXT * 20})
        return list(answer.json()["tokens"])


def prompt_of(tokens: Sequence[int], length: int, seed: int) -> list[int]:
    """A prompt of exactly `length` tokens; different seeds share no first block."""
    return [tokens[(seed * 37) % 100], *tokens[(seed * 13) % 150 :]][:length]


class Metrics(EngineMetrics):
    """An engine's `/metrics`, with what the tests ask most."""

    def transfers(self, **labels: str) -> float:
        return self.value("kvberth:transfers_total", **labels)


def wait_until_dispatched(cluster: LocalCluster, kind: str, count: int = 1) -> None:
    """Until the router has so many requests at its `prefill` or `decode` workers.

    An engine's own gauges do not move before its step is over, which for a long prompt on a processor takes seconds.
    """

    def in_flight() -> int:
        health = httpx.get(f"{cluster.router_url}/health", timeout=5).json()
        return sum(engine["in_flight"] for engine in health[kind])

    eventually(lambda: in_flight() == count, 10, f"{count} requests at the {kind} workers")


def eventually(is_true: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that must become true."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def assert_nothing_left(cluster: LocalCluster, seconds: float = 5.0) -> None:
    """No engine holds a block or a request."""
    for engine in [*cluster.prefill, *cluster.decode]:
        metrics = Metrics(engine.url)
        for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"):
            eventually(lambda m=metrics, n=name: m.value(n) == 0, seconds, f"{name} of {engine.name} is 0")
