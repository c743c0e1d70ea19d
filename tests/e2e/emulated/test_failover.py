"""Engines that go while requests stand in every phase: clients behind the router see right answers, and no errors."""

import json
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.e2e.client import Client, assert_nothing_left, eventually
from tests.e2e.emulated.profiles import slow_profile
from tests.e2e.emulated.test_cluster import counter, settings
from tests.e2e.emulated.test_deaths import prompt, start_again

from kvberth.launch import LocalCluster
from kvberth.launch.engine import EngineProcess

MAX_TOKENS = 600
LENGTHS = (300, 2500, 6000)
MODEL = "slow"
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> str:
    """One whose prefill takes seconds, so that there is time to do something meanwhile.

    A decode worker gives up on a silent prefill worker after 3 s and computes the prompt itself, which takes 4.5 s for
    a long one: before it has an answer, the router, which needs 6 s, has found another prefill worker.
    """
    return slow_profile(tmp_path_factory.mktemp("profile"), prompt_token_us=300.0)


@pytest.fixture
def cluster(pool, profile) -> LocalCluster:
    """Two of each kind, so that somebody else is there, and a router that finds out soon."""
    return pool.get(
        settings(
            model=profile,
            prefill=2,
            decode=2,
            engine_args=("--max-num-batched-tokens", "128"),
            router_args=("--health-interval-seconds", "0.5"),
        )
    )


class Asked:
    """One streamed request, on a thread of its own."""

    def __init__(
        self,
        cluster: LocalCluster,
        threads: ThreadPoolExecutor,
        path: str,
        body: dict[str, Any],
        binding: str = "auto",
    ) -> None:
        self._cluster = cluster
        self._path = path
        self._body = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **body}
        self.text = ""
        self.request_id = uuid.uuid4().hex
        self._headers = {"x-request-id": self.request_id, "x-kvberth-binding": binding}
        self.done: Future[None] = threads.submit(self._run)

    def timeline(self) -> dict[str, Any]:
        answer = httpx.get(f"{self._cluster.router_url}/kvberth/requests/{self.request_id}", timeout=10)
        return dict(answer.json())

    def facts(self, what: str) -> list[dict[str, Any]]:
        """Of all events of a kind."""
        return [event["facts"] for event in self.timeline().get("events", []) if event["what"] == what]

    def worker(self) -> EngineProcess:
        """The decode worker that has it."""
        url = self.facts("decode_sent")[-1]["engine"]
        return next(engine for engine in self._cluster.decode if engine.url == url)

    def wait_for_text(self, characters: int) -> None:
        eventually(lambda: len(self.text) > characters, 20, "the stream has begun")

    def result(self) -> tuple[str, dict[str, int]]:
        """All text, and the usage."""
        self.done.result(timeout=60)
        return self.text, self._usage

    def _run(self) -> None:
        url = self._cluster.router_url + self._path
        body = self._body | {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", url, json=body, headers=self._headers, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                self._take(line)
        assert self._is_complete

    _usage: dict[str, int]
    _is_complete = False

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self._is_complete = True
        elif line:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                self.text += choice["text"] if self._path == COMPLETIONS else choice["delta"].get("content") or ""
            self._usage = event.get("usage") or {}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Prompts of three lengths, and two chats."""
    told = [{"messages": [{"role": "user", "content": f"Tell me of {thing}."}]} for thing in ("berths", "ships" * 300)]
    return [(COMPLETIONS, {"prompt": prompt(seed, length)}) for seed, length in enumerate(LENGTHS)] + [
        (CHAT, body) for body in told
    ]


@pytest.fixture
def expected(cluster, threads) -> list[tuple[str, dict[str, int]]]:
    """What is answered when nothing goes wrong."""
    return [Asked(cluster, threads, path, body).result() for path, body in bodies()]


def bring_back(engine: EngineProcess, how: str) -> None:
    if how == "killed":
        engine.kill()  # which waits for its end
        start_again(engine)
    else:
        engine.signal(signal.SIGCONT)


def assert_all_is_well(cluster: LocalCluster) -> None:
    assert counter(cluster, "corruptions") == 0
    eventually(lambda: Client(cluster.router_url, MODEL).complete([1, 2, 3]) != "", 20, "the router serves")
    assert_nothing_left(cluster)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_streams_of_a_decode_worker_that_goes_are_continued(cluster, threads, expected, how):
    """In the middle of their answers: each ends with the same tokens and the same counts, on the other one."""
    asked = [Asked(cluster, threads, path, body) for path, body in bodies()]
    for each in asked:
        each.wait_for_text(50)
    victim = next(each for each in asked if not each.done.done()).worker()
    victim.signal(SIGNALS[how])
    try:
        assert [each.result() for each in asked] == expected
        continued = [each for each in asked if each.facts("continued")]
        assert continued
        for each in continued:
            assert [10 <= fact["tokens"] < MAX_TOKENS for fact in each.facts("continued")] == [True]
            assert each.worker() is not victim
    finally:
        bring_back(victim, how)
    assert_all_is_well(cluster)


def test_decode_worker_that_goes_before_the_first_token_is_bound_again(cluster, threads):
    """The prefill goes on and is done once; its KV goes to the other decode worker."""
    body = {"prompt": prompt(9, 15000)}
    text, _ = Asked(cluster, threads, COMPLETIONS, body).result()
    asked = Asked(cluster, threads, COMPLETIONS, body, "early")
    eventually(lambda: asked.facts("registered") != [], 10, "its blocks are reserved")
    victim = asked.worker()
    assert asked.facts("prefill_done") == []
    victim.signal(signal.SIGKILL)
    assert asked.result()[0] == text
    attempts = [sent["attempt"] for sent in asked.facts("decode_sent")]
    assert attempts == [0, 1]
    assert len(asked.facts("prefill_sent")) == 1
    assert asked.worker() is not victim
    bring_back(victim, "killed")
    assert_all_is_well(cluster)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_prefill_worker_that_goes_is_replaced(cluster, threads, how):
    """In mid-prefill: the other one begins anew, with a new transfer."""
    body = {"prompt": prompt(10, 15000)}
    text, _ = Asked(cluster, threads, COMPLETIONS, body).result()
    asked = Asked(cluster, threads, COMPLETIONS, body)
    eventually(lambda: asked.facts("prefill_began") != [], 10, "it is being computed")
    url = asked.facts("prefill_sent")[0]["engine"]
    victim = next(engine for engine in cluster.prefill if engine.url == url)
    began = time.monotonic()
    assert asked.facts("prefill_done") == []
    victim.signal(SIGNALS[how])
    try:
        assert asked.result()[0] == text
        assert time.monotonic() - began < 15
        first, second = asked.facts("prefill_sent")
        assert first["engine"] != second["engine"]
        assert first["transfer_id"] != second["transfer_id"]
    finally:
        bring_back(victim, how)
    assert_all_is_well(cluster)


def test_without_prefill_workers_requests_are_served_undivided(cluster, threads, expected):
    """Both are gone: the same answers, and the header says why."""
    for engine in cluster.prefill:
        engine.kill()
    try:
        assert [Asked(cluster, threads, path, body).result() for path, body in bodies()] == expected
        answer = Client(cluster.router_url, MODEL).post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 1})
        assert answer.headers["x-kvberth-reason"] == "no_prefill_ready"
    finally:
        for engine in cluster.prefill:
            start_again(engine)
    assert_all_is_well(cluster)
