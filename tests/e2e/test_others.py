"""Programs that are not ours, against our engines and our router."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually, prompt_of
from tests.e2e.vllm_bench import vllm_bench_serve

from kvberth.launch import PortLease


def test_vllm_bench_serve_against_our_router(cluster, tmp_path: Path):
    """vLLM's load generator finds nothing unusual."""
    flags = "--dataset-name random --random-input-len 64 --random-output-len 8 --num-prompts 8 --request-rate 4"
    result = vllm_bench_serve(cluster.router_url, "smollm2", cluster.settings.model, tmp_path, *flags.split())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 8
    assert_nothing_left(cluster)


@pytest.mark.timeout(600)
def test_idle_engines_cost_nothing(cluster):
    """With the connector, connected, an engine uses no more of a core than without it: within one percent.

    The router, which reads the metrics of its own engines only, holds still meanwhile.
    """
    Client(cluster.router_url, "smollm2").complete([1, 2, 3, 4, 5], "push")
    engines = [*cluster.prefill, *cluster.decode, *cluster.undivided]
    seconds = 30.0

    def used() -> list[float]:
        return [sum(sum(each.cpu_times()[:2]) for each in engine.family) for engine in engines]

    cluster.router.signal(signal.SIGSTOP)
    try:
        time.sleep(2.0)
        before = used()
        time.sleep(seconds)
        prefill, decode, undivided = ((two - one) / seconds for one, two in zip(before, used(), strict=True))
    finally:
        cluster.router.signal(signal.SIGCONT)
    print(f"idle: prefill {prefill:.4f}, decode {decode:.4f}, undivided {undivided:.4f} cores")
    assert prefill <= undivided + 0.01
    assert decode <= undivided + 0.01


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_vllm_router_in_front_of_our_engines(pool, settings, tmp_path: Path, mode):
    """vllm-project's router knows vLLM's connectors only; our engines answer as one through it, in either mode.

    It passes the prefill worker's id on, but not its key: the id is the name of the key.
    """
    cluster = pool.get(replace(settings, mode=mode, name_engines=True))
    undivided = Client(cluster.undivided[0].url, "smollm2")
    log = tmp_path / "vllm-router.log"
    with PortLease() as ports, log.open("wb") as output:
        url = f"http://127.0.0.1:{(port := ports.take())}"
        command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        command += ["--prefill", cluster.prefill[0].url, "--decode", cluster.decode[0].url]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(ports.take())]
        with subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                eventually(lambda: process.poll() is not None or is_up(url), 60, "vllm-router is up")
                assert process.poll() is None, log.read_text()
                theirs = Client(url, undivided.model)
                metrics = Metrics(cluster.decode[0].url)
                before = metrics.moved()
                prompts = [prompt_of(undivided.tokens(), length, 300 + length) for length in (5, 32, 33, 300)]
                answers = [theirs.complete(prompt) for prompt in prompts]
                assert answers == [undivided.complete(prompt) for prompt in prompts]
                moved = metrics.moved_since(before, len(prompts), timeout_seconds=15.0)
                assert (moved.completed, moved.other) == (len(prompts), 0), log.read_text()[-2000:]
                assert metrics.transfers(role="consumer", mode=mode) > 0
                assert_nothing_left(cluster)
            finally:
                process.terminate()
