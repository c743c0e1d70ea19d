"""Engines that die or hang. Last, since what dies here is started anew for whoever comes next."""

import signal
import threading
import time

import httpx
import pytest
from tests.e2e.client import Client, Metrics, eventually, prompt_of, wait_until_dispatched

MODES = pytest.mark.parametrize("mode", ["push", "pull"])


class Running:
    """A completion in a thread."""

    def __init__(self, client: Client, prompt: list[int], mode: str, max_tokens: int = 16) -> None:
        self.answer: httpx.Response | None = None
        self.began = time.monotonic()
        self.seconds = 0.0
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

        def run() -> None:
            self.answer = client.post("/v1/completions", body, {"x-kvberth-mode": mode})
            self.seconds = time.monotonic() - self.began

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(120)
        assert self.answer is not None, "the request hangs"
        return self.answer


@MODES
def test_prefill_worker_hangs_in_mid_prefill(cluster, router: Client, undivided: Client, mode):
    """SIGSTOP: in push the decode worker notices the silence and computes for itself; nothing waits for long."""
    prompt = prompt_of(undivided.tokens(), 1500, 500 if mode == "push" else 510)
    wanted = undivided.complete(prompt)
    engine = cluster.prefill[0]
    running = Running(router, prompt, mode)
    wait_until_dispatched(cluster, "prefill")
    time.sleep(1.0)
    engine.signal(signal.SIGSTOP)
    try:
        if mode == "push":
            answer = running.result()
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == wanted
    finally:
        engine.signal(signal.SIGCONT)
    assert running.result().json()["choices"][0]["text"] == wanted
    for each in (*cluster.prefill, *cluster.decode):
        metrics = Metrics(each.url)
        eventually(lambda m=metrics: m.value("vllm:kv_cache_usage_perc") == 0, 40, f"{each.name} is empty")
    eventually(lambda: httpx.get(f"{cluster.router_url}/health").json()["status"] == "ok", 10, "the router is well")
    assert router.complete(prompt[:33], mode) == undivided.complete(prompt[:33])


@MODES
def test_prefill_worker_dies_in_mid_prefill(cluster, router: Client, undivided: Client, mode):
    """SIGKILL: the request is answered without it, and so is the next one; the client is told how."""
    prompt = prompt_of(undivided.tokens(), 1500, 520 if mode == "push" else 530)
    wanted = undivided.complete(prompt)
    engine = cluster.prefill[0]
    running = Running(router, prompt, mode)
    wait_until_dispatched(cluster, "prefill")
    time.sleep(1.0)
    engine.kill()
    answer = running.result()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == wanted
    after = router.post("/v1/completions", {"prompt": prompt[:33], "max_tokens": 4, "temperature": 0})
    assert after.status_code == 200
    assert after.headers["x-kvberth-path"] == "undivided"
    assert httpx.get(f"{cluster.router_url}/health").json()["status"] == "degraded"
    metrics = Metrics(cluster.decode[0].url)
    eventually(lambda: metrics.value("vllm:kv_cache_usage_perc") == 0, 5, "D is empty")


@MODES
def test_decode_worker_dies_in_mid_answer(cluster, router: Client, undivided: Client, mode):
    """No empty 200: an error in OpenAI's form; then 503 until it is back; P's blocks are free."""
    prompt = prompt_of(undivided.tokens(), 40, 540 if mode == "push" else 550)
    engine = cluster.decode[0]
    running = Running(router, prompt, mode, max_tokens=2000)
    eventually(lambda: Metrics(engine.url).value("vllm:num_requests_running") == 1, 20, "D decodes")
    engine.kill()
    answer = running.result()
    assert answer.status_code in {502, 503}
    assert answer.json()["error"]["message"]
    after = router.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
    assert after.status_code == 503
    assert "decode" in after.json()["error"]["message"]
    assert httpx.get(f"{cluster.router_url}/health").status_code == 503
    metrics = Metrics(cluster.prefill[0].url)
    eventually(lambda: metrics.value("vllm:kv_cache_usage_perc") == 0, 5, "P is empty")
