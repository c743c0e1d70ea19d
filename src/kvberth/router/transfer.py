"""The `kv_transfer_params` that the router gives to the two legs of one transfer.

The names are vLLM's own wherever vLLM has one, so that they read the same in an engine's log. What a connector
answers (pull) is passed on as bytes and not looked into here.
"""

import msgspec

from kvberth.router.config import Mode
from kvberth.router.engines import EngineInfo

__all__ = ["decode_params", "prefill_params"]


class _PrefillParams(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_decode: bool = True
    do_remote_prefill: bool = False
    transfer_id: str
    attempt: int = 0
    num_consumers: int
    transfer_mode: Mode


class _DecodeParams(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_id: str
    attempt: int = 0
    num_consumers: int
    transfer_mode: Mode = Mode.PUSH
    remote_engine_id: str
    # vLLM's own connectors refuse parameters without one, but pair the legs by the X-Request-Id that both have.
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int


def prefill_params(transfer_id: str, *, num_consumers: int, mode: Mode) -> bytes:
    """JSON for P's leg. `num_consumers` sequences of D will ask for the same blocks (the request's `n`)."""
    return msgspec.json.encode(_PrefillParams(transfer_id=transfer_id, num_consumers=num_consumers, transfer_mode=mode))


def decode_params(transfer_id: str, *, num_consumers: int, producer: EngineInfo) -> bytes:
    """JSON for D's leg of a push: where the prefill worker listens for registrations."""
    return msgspec.json.encode(
        _DecodeParams(
            transfer_id=transfer_id,
            num_consumers=num_consumers,
            remote_engine_id=producer.engine_id,
            remote_request_id=transfer_id,
            remote_host=producer.control_host,
            remote_port=producer.control_port,
            tp_size=producer.tp_size,
        )
    )
