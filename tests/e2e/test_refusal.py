"""Engines that do not fit refuse each other, and say why."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually, prompt_of

from kvberth.launch import EngineProcess, PortLease
from kvberth.launch.engine import EngineKind, Hardware


@pytest.fixture
def misfit(cluster, tmp_path) -> Iterator[EngineProcess]:
    """A decode worker with blocks of 64 tokens beside a prefill worker with blocks of 32."""
    with PortLease() as ports:
        engine = EngineProcess(
            EngineKind.DECODE,
            9,
            replace(cluster.settings, block_size=64),
            Hardware.detect(),
            num_engines=4,
            position=3,
            port=ports.take(),
            control_port=0,
            run_dir=tmp_path,
        )
        engine.start()
        try:
            eventually(engine.is_ready, 300, "the misfit is ready")
            yield engine
        finally:
            engine.finish_stop()


def test_block_sizes_that_differ(cluster, undivided: Client, misfit: EngineProcess):
    """The request is answered, computed where it is; the answer and the log name the field and both values."""
    prompt = prompt_of(undivided.tokens(), 100, 400)
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
    prefill, decode = Client(cluster.prefill[0].url, "smollm2"), Client(misfit.url, "smollm2")
    to_prefill = {"do_remote_decode": True, "transfer_id": "misfit"}
    params = prefill.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": to_prefill}).json()
    answers: list[Any] = []
    request = {**body, "max_tokens": 16, "kv_transfer_params": params["kv_transfer_params"]}
    thread = threading.Thread(target=lambda: answers.append(decode.post("/v1/completions", request).json()))
    thread.start()
    thread.join(30)
    (answer,) = answers
    assert answer["choices"][0]["text"] == undivided.complete(prompt)
    transfer = answer["kv_transfer_params"]["transfer"]
    reason = "block_size differs: prefill worker has 32, decode worker has 64"
    assert transfer == {"ok": False, "reason": "incompatible", "detail": reason}
    metrics = Metrics(misfit.url)
    eventually(lambda: metrics.transfers(end="failed", reason="incompatible", role="consumer") == 1, 5, "it is counted")
    assert reason in misfit.log.read_text()
    assert reason in cluster.prefill[0].log.read_text()
    assert_nothing_left(cluster, 40.0)  # P holds the blocks for a worker that fits, until the lease ends
