"""`kv_transfer_params`: what routers and engines tell each other about one request.

The names are those of vLLM's own NIXL connector, so that routers that know it work unchanged; `transfer_id`, `attempt`,
`num_consumers` and `transfer_mode` are additions that a router may leave out.
"""

import hashlib
import re
from typing import Any

import msgspec
import numpy as np

from kvberth.protocol import TransferKey, TransferMode

__all__ = ["ParamsError", "TransferParams", "external_request_id", "prompt_digest"]

_VLLM_REQUEST_ID = re.compile(r"^(?:cmpl-(?P<completion>.+)-\d+|chatcmpl-(?P<chat>.+))-[0-9a-f]{8}$")
_CHILD_PREFIX = re.compile(r"^(\d+)_")


class ParamsError(ValueError):
    """`kv_transfer_params` that cannot be used; the request is then served without a handoff."""


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's parameters. Unknown names are ignored: other connectors' routers send more.

    Attributes:
        do_remote_decode: this worker is to prefill, another one decodes.
        do_remote_prefill: another worker prefills, this one decodes.
        transfer_id: names the handoff on both workers.
        attempt: the transfer's epoch.
        num_consumers: how many requests will want the same KV, the request's `n`.
        transfer_mode: push or pull; the connector's setting if it is not given.
        remote_engine_id, remote_host, remote_port: the prefill worker and its control channel, for the decode worker.
        remote_public_key: of the prefill worker. Whoever sent the request says so, and is believed only if it is an
            accepted key.
        remote_request_id: the prefill worker's name of the request; the transfer's id if `transfer_id` is not given.
        tp_size: the prefill worker's tensor-parallel size.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str | None = None
    attempt: int = 0
    num_consumers: int = 1
    transfer_mode: TransferMode | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_public_key: str | None = None
    remote_request_id: str | None = None
    tp_size: int | None = None

    @classmethod
    def parse(cls, params: dict[str, Any]) -> "TransferParams":
        """Check and convert.

        Raises:
            ParamsError: a value of the wrong type or outside its range, or a decode request without the prefill
                worker's address.
        """
        try:
            parsed = msgspec.convert(params, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ParamsError(f"kv_transfer_params: {error}") from error
        if parsed.attempt < 0:
            raise ParamsError(f"kv_transfer_params: attempt must be 0 or more, not {parsed.attempt}")
        if not 1 <= parsed.num_consumers <= 1024:
            raise ParamsError(f"kv_transfer_params: num_consumers must be 1 to 1024, not {parsed.num_consumers}")
        if parsed.do_remote_prefill and (not parsed.remote_host or parsed.remote_port is None):
            raise ParamsError("kv_transfer_params: do_remote_prefill needs remote_host and remote_port")
        return parsed

    @property
    def producer_identity(self) -> str:
        """What the prefill worker must prove to be: its key, or the name of its certificate, which an operator may
        have given to the engine as its id, for routers that do not pass the key on.
        """
        return self.remote_public_key or self.remote_engine_id or ""

    def key(self, request_id: str) -> TransferKey:
        """The transfer of the request that vLLM calls `request_id`, on the decode worker."""
        transfer_id = self.transfer_id or external_request_id(self.remote_request_id or request_id)
        child = _CHILD_PREFIX.match(request_id) if self.num_consumers > 1 else None
        return TransferKey(transfer_id, int(child.group(1)) if child else 0)

    def keys(self, request_id: str) -> tuple[TransferKey, ...]:
        """The transfers, one per consumer, of the request that vLLM calls `request_id`, on the prefill worker."""
        transfer_id = self.transfer_id or external_request_id(request_id)
        return tuple(TransferKey(transfer_id, index) for index in range(self.num_consumers))

    def declined_keys(self, request_id: str) -> tuple[TransferKey, ...]:
        """What a request that will not be served gives up: a child its own transfer, a parent those of all children.

        vLLM makes the children of a request with n > 1 after it has checked it, so a rejected one has none.
        """
        own = self.key(request_id)
        if _CHILD_PREFIX.match(request_id):
            return (own,)
        return tuple(TransferKey(own.transfer_id, index) for index in range(self.num_consumers))


def external_request_id(request_id: str) -> str:
    """The `X-Request-Id` that vLLM made `request_id` from; an id of another form is returned as it is.

    vLLM puts the endpoint in front, the prompt's position behind (completions) and a random suffix behind that. Two
    workers that were given one `X-Request-Id` have it in common, which is how a router that knows no `transfer_id` ties
    its two legs together. vllm-router, in push, names it in `remote_request_id`.
    """
    found = _VLLM_REQUEST_ID.match(request_id)
    return (found["completion"] or found["chat"]) if found else request_id


def prompt_digest(token_ids: list[int], *others: str) -> bytes:
    """16 bytes that differ when the prompts differ.

    Args:
        token_ids: the prompt.
        others: whatever else the KV depends on, such as the adapter's name or hashes of images.
    """
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int32).tobytes(), digest_size=16)
    for other in others:
        digest.update(b"\0" + other.encode())
    return digest.digest()
