"""Engines that do not fit refuse each other, and say why."""

import threading
from typing import Any

from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually, prompt_of
from tests.e2e.conftest import MODEL, decode_worker_beside


def hand_over(cluster, decode: Client, prompt: list[int], transfer_id: str) -> dict[str, Any]:
    """A sequential router: P first, then D with what P answered."""
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
    to_prefill = {"do_remote_decode": True, "transfer_id": transfer_id}
    prefill = Client(cluster.prefill[0].url, MODEL)
    params = prefill.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": to_prefill}).json()
    answers: list[Any] = []
    request = {**body, "max_tokens": 16, "kv_transfer_params": params["kv_transfer_params"]}
    thread = threading.Thread(target=lambda: answers.append(decode.post("/v1/completions", request).json()))
    thread.start()
    thread.join(30)
    (answer,) = answers
    return dict(answer)


def test_block_sizes_that_the_backend_cannot_split(cluster, undivided: Client, tmp_path):
    """The request is answered, computed where it is; the answer and the log name the field and both values."""
    prompt = prompt_of(undivided.tokens(), 100, 400)
    with decode_worker_beside(cluster, tmp_path, block_size=64) as misfit:
        answer = hand_over(cluster, Client(misfit.url, MODEL), prompt, "misfit")
        assert answer["choices"][0]["text"] == undivided.complete(prompt)
        transfer = answer["kv_transfer_params"]["transfer"]
        reason = "block_size differs: prefill worker has 32, decode worker has 64"
        assert (transfer["ok"], transfer["reason"], transfer["detail"]) == (False, "incompatible", reason)
        metrics = Metrics(misfit.url)
        eventually(lambda: metrics.transfers(end="failed", reason="incompatible", role="consumer") == 1, 5, "counted")
        assert reason in misfit.log.read_text()
        assert reason in cluster.prefill[0].log.read_text()
        assert_nothing_left(cluster, 40.0)  # P holds the blocks for a worker that fits, until the lease ends
