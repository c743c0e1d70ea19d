"""The two legs of a request, sent by hand where a test needs more than the router's choice of moments."""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from kvberth.launch.engine import EngineProcess
from kvberth.router.engines import Role, parse_engine_info

__all__ = ["Legs", "told"]


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What a decode worker says of its handoff."""
    return dict(answer["kv_transfer_params"]["transfer"])


class Legs:
    """Requests to engines, in threads of their own. A context manager: it waits for all of them.

    Args:
        model: as clients call it.
        prefill: the prefill worker, which is asked for its address now; it may be dead later.
    """

    def __init__(self, model: str, prefill: EngineProcess) -> None:
        self._model = model
        self._prefill = prefill
        self._producer = parse_engine_info(httpx.get(f"{prefill.url}/metrics", timeout=10).text, Role.PREFILL)
        self._threads = ThreadPoolExecutor(32)
        self._prefix = uuid.uuid4().hex[:8]  # a decode worker remembers names for two minutes

    def __enter__(self) -> "Legs":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def transfer_id(self, name: str) -> str:
        """The name that both legs are told."""
        return f"{self._prefix}-{name}"

    def ask(
        self,
        engine: EngineProcess,
        prompt: Sequence[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 16,
        fields: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One leg, with more fields in its body if need be; the answer's body, with `seconds` that it took."""
        body: dict[str, Any] = {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True} | (fields or {})
        if params is not None:
            body["kv_transfer_params"] = params
        began = time.monotonic()
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return {**answer.json(), "seconds": time.monotonic() - began}

    def start(self, *arguments: Any, **named: Any) -> "Future[dict[str, Any]]":
        """`ask`, in the background."""
        return self._threads.submit(self.ask, *arguments, **named)

    def prefill(
        self, prompt: Sequence[int], name: str, *, fields: dict[str, Any] | None = None, **more: Any
    ) -> "Future[dict[str, Any]]":
        """P's leg."""
        params = {"do_remote_decode": True, "transfer_id": self.transfer_id(name), **more}
        return self.start(self._prefill, prompt, params, max_tokens=1, fields=fields)

    def decode(
        self,
        engine: EngineProcess,
        prompt: Sequence[int],
        name: str,
        *,
        max_tokens: int = 16,
        **more: Any,
    ) -> "Future[dict[str, Any]]":
        """D's leg, as a router sends it that does not wait for P."""
        params = {
            "do_remote_prefill": True,
            "transfer_id": self.transfer_id(name),
            "remote_engine_id": self._producer.engine_id,
            "remote_host": self._producer.control_host,
            "remote_port": self._producer.control_port,
            "tp_size": self._producer.tp_size,
            "remote_public_key": self._producer.public_key,
            **more,
        }
        return self.start(engine, prompt, params, max_tokens=max_tokens)

    def in_turn(
        self, engine: EngineProcess, prompt: Sequence[int], name: str, max_tokens: int = 16, **more: Any
    ) -> dict[str, Any]:
        """A router that passes on to D what P has answered."""
        params = self.prefill(prompt, name, **more).result()["kv_transfer_params"]
        return self.ask(engine, prompt, params, max_tokens)
