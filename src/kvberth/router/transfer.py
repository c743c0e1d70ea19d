"""The `kv_transfer_params` that the router gives to the two legs of one transfer.

The names are vLLM's own wherever vLLM has one, so that they read the same in an engine's log. What a connector
answers is passed on as it is, but for the attempt.
"""

import msgspec

from kvberth.router.config import Mode
from kvberth.router.engines import EngineInfo

__all__ = ["decode_params", "prefill_params", "with_attempt"]


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
    transfer_mode: Mode
    remote_engine_id: str
    # vLLM's own connectors refuse parameters without one, but pair the legs by the X-Request-Id that both have.
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_public_key: str | msgspec.UnsetType = msgspec.UNSET


def prefill_params(transfer_id: str, *, num_consumers: int, mode: Mode) -> bytes:
    """JSON for P's leg. `num_consumers` sequences of D will ask for the same blocks (the request's `n`)."""
    return msgspec.json.encode(_PrefillParams(transfer_id=transfer_id, num_consumers=num_consumers, transfer_mode=mode))


def decode_params(transfer_id: str, *, num_consumers: int, mode: Mode, producer: EngineInfo, attempt: int = 0) -> bytes:
    """JSON for a leg of D that does not wait for P's answer: where the prefill worker listens for registrations."""
    return msgspec.json.encode(
        _DecodeParams(
            transfer_id=transfer_id,
            attempt=attempt,
            num_consumers=num_consumers,
            transfer_mode=mode,
            remote_engine_id=producer.engine_id,
            remote_request_id=transfer_id,
            remote_host=producer.control_host,
            remote_port=producer.control_port,
            tp_size=producer.tp_size,
            remote_public_key=producer.public_key or msgspec.UNSET,
        )
    )


def with_attempt(said_by_prefill: bytes, attempt: int) -> bytes:
    """What a prefill worker's connector answered, for the decode worker of this attempt (from 0)."""
    if attempt == 0:
        return said_by_prefill
    try:
        fields = msgspec.json.decode(said_by_prefill, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # no object: nothing that we know, and nothing that could hold an attempt
        return said_by_prefill
    return msgspec.json.encode({**fields, "attempt": attempt})
