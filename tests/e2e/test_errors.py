"""What goes wrong gets a clear error and leaves nothing behind."""

import socket
import threading
import time
from typing import Any

import httpx
import pytest
from tests.e2e.client import Client, assert_nothing_left, eventually, prompt_of, wait_until_dispatched

MODES = pytest.mark.parametrize("mode", ["push", "pull"])


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The OpenAI-style error."""
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return dict(error)


@MODES
def test_prompt_longer_than_the_model(cluster, router: Client, mode):
    """The engine's own words, with the numbers."""
    body = {"prompt": [100] * 5000, "max_tokens": 5}
    answer = router.post("/v1/completions", body, {"x-kvberth-mode": mode})
    assert answer.status_code == 400
    assert "4096" in error_of(answer)["message"]
    assert_nothing_left(cluster)


@MODES
def test_unknown_model(cluster, router: Client, mode):
    """404, and it names the model."""
    answer = router.post("/v1/completions", {"model": "nonesuch", "prompt": "x"}, {"x-kvberth-mode": mode})
    assert answer.status_code == 404
    assert "nonesuch" in error_of(answer)["message"]
    assert_nothing_left(cluster)


@MODES
def test_parameters_that_do_not_go_together(cluster, router: Client, mode):
    """Several greedy choices are refused by the decode worker after the prefill worker has begun."""
    body = {"prompt": "x " * 200, "n": 3, "temperature": 0, "max_tokens": 4}
    answer = router.post("/v1/completions", body, {"x-kvberth-mode": mode})
    assert answer.status_code == 400
    assert "n must be 1" in error_of(answer)["message"]
    assert_nothing_left(cluster)


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [(b'{"model": "smollm2", "prompt": ', 400, "JSON"), (b"[1, 2]", 400, "object"), (b"\xff\xfe", 400, "JSON")],
)
def test_malformed_body(cluster, content, status, text):
    """Refused by the router, which says what is wrong."""
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{cluster.router_url}/v1/completions", content=content, headers=headers, timeout=10)
    assert answer.status_code == status
    assert text in error_of(answer)["message"]
    assert_nothing_left(cluster)


def hang_up(url: str, body: str, mode: str, after_seconds: float) -> None:
    """Send a request and close the connection after a while."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}x-kvberth-mode: {mode}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(after_seconds)


def router_is_idle(url: str) -> bool:
    """Whether the router has nothing at any engine."""
    health = httpx.get(f"{url}/health", timeout=5).json()
    return all(engine["in_flight"] == 0 for kind in ("prefill", "decode") for engine in health[kind])


@MODES
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_client_that_goes_away(cluster, router: Client, undivided: Client, mode, streaming, stage):
    """In mid-prefill or in mid-answer: both legs end within a second, and both engines' blocks are free."""
    length = 2500 if stage == "prefill" else 40
    prompt = prompt_of(undivided.tokens(), length, {"push": 200, "pull": 220}[mode] + streaming)
    body = httpx.Request("POST", "http://x", json={
        "model": "smollm2", "prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": streaming
    }).content.decode()  # fmt: skip
    thread = threading.Thread(target=hang_up, args=(cluster.router_url, body, mode, 2.0))
    thread.start()
    wait_until_dispatched(cluster, stage)
    thread.join()
    eventually(lambda: router_is_idle(cluster.router_url), 1.5, "both legs have ended")
    assert_nothing_left(cluster, 10.0)
    assert router.complete(prompt[:33], mode) == undivided.complete(prompt[:33])


def test_mode_that_is_none(router: Client):
    """The header's values are named."""
    answer = router.post("/v1/completions", {"prompt": "x"}, {"x-kvberth-mode": "shove"})
    assert answer.status_code == 400
    assert "push" in error_of(answer)["message"]


def test_handoff_parameters_are_the_router_s(router: Client):
    """A client cannot name a transfer."""
    answer = router.post("/v1/completions", {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}})
    assert answer.status_code == 400
    assert "kv_transfer_params" in error_of(answer)["message"]
