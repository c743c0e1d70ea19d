"""What the load generator's tests share."""

import pytest

from kvberth.bench import RequestRecord


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def record():
    """Make a record of a request that succeeded, or failed if an error is given."""

    def make(index: int = 0, **fields: object) -> RequestRecord:
        whole: dict[str, object] = {
            "index": index,
            "request_id": f"r{index}",
            "planned_s": float(index),
            "sent_s": float(index),
            "late_ms": 0.0,
            "status": 200,
            "prompt_tokens": 10,
            "output_tokens": 3,
            "ttft_ms": 100.0,
            "tpot_ms": 10.0,
            "e2e_ms": 120.0,
            "itl_ms": [10.0, 10.0],
        }
        if "error" in fields:
            whole |= {"output_tokens": 0, "ttft_ms": None, "tpot_ms": None, "e2e_ms": None, "itl_ms": []}
        return RequestRecord(**(whole | fields))

    return make
