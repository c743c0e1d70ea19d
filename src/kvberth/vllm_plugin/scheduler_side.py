"""The scheduler's half of the connector: which requests take part in a handoff, and with which blocks.

It runs in the engine's process, on the engine's thread, and does no I/O: it turns vLLM's hooks into commands that the
next step's metadata carries to the movers. Blocks are kept until the movers of all ranks have let go of them: a
producer's because `finish` says so, a consumer's because vLLM keeps the blocks of a request that waits for remote KV
until it is reported.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvberth.layout import block_range, num_blocks_for
from kvberth.mover import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    Command,
    DeclineRequest,
    EndPrefill,
    FinishPrefill,
    RestartPrefill,
    SchedulePrefill,
)
from kvberth.protocol import Reason, TransferKey
from kvberth.protocol.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    RequestDeclined,
    RequestWaiting,
)
from kvberth.protocol.ids import RequestId
from kvberth.vllm_plugin.free_blocks import FreeBlocks
from kvberth.vllm_plugin.meta import TransferOutcome
from kvberth.vllm_plugin.params import ParamsError, TransferParams, prompt_digest
from kvberth.vllm_plugin.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

__all__ = ["SchedulerSide"]

_log = logging.getLogger(__name__)

_COMPLETE = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}


@dataclass(slots=True)
class _Prefill:
    """How much of a prompt's KV the movers have been told of."""

    keys: tuple[TransferKey, ...]
    num_tokens: int
    is_streamed: bool
    num_blocks: int = 0
    is_complete: bool = False

    def advance(self, num_computed: int, block_ids: Sequence[int], block_size: int) -> AdvancePrefill | None:
        """What is new when so many tokens are computed; None if no block is."""
        is_complete = num_computed >= self.num_tokens
        num_ready = num_blocks_for(self.num_tokens, block_size) if is_complete else num_computed // block_size
        if not is_complete and (num_ready <= self.num_blocks or not self.is_streamed):
            return None
        first, self.num_blocks, self.is_complete = self.num_blocks, num_ready, is_complete
        blocks = tuple(block_ids[first:num_ready])
        return AdvancePrefill(self.keys, PrefillAdvanced(first, blocks, is_complete))


class SchedulerSide:
    """See the module. Methods are named after what vLLM's scheduler tells.

    Args:
        settings: the connector's.
        block_size: tokens per block.
        is_producer, is_consumer: the engine's role.
        engine_id, host, port, tp_size, public_key: what decode workers are told of this engine. With a public key, it
            wants prefill workers to have one too.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        block_size: int,
        is_producer: bool,
        is_consumer: bool,
        engine_id: str,
        host: str,
        port: int,
        tp_size: int,
        public_key: str = "",
    ) -> None:
        self._has_keys = bool(public_key)
        self._settings = settings
        self._block_size = block_size
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._address = {
            "remote_engine_id": engine_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": tp_size,
            **({"remote_public_key": public_key} if public_key else {}),
        }
        self._commands: list[Command] = []
        self._producing: dict[str, tuple[TransferKey, ...]] = {}
        self._prefills: dict[str, _Prefill] = {}
        self._awaiting: dict[str, TransferKey] = {}
        self._aborting: dict[str, TransferKey] = {}
        self._live_keys: set[TransferKey] = set()
        self._reported: dict[str, TransferOutcome] = {}
        self._outcomes: dict[str, TransferOutcome] = {}
        self._free_blocks: FreeBlocks | None = None
        self._leased: dict[str, int] = {}
        self._told_leased = 0

    def has_pool(self, pool: "BlockPool") -> None:
        """The engine's blocks, before the first request."""
        if self._settings.sort_free_blocks:
            self._free_blocks = FreeBlocks(pool)

    def take_commands(self) -> list[Command]:
        """What has come together since the last step."""
        taken, self._commands = self._commands, []
        return taken

    def take_leased_blocks(self) -> int | None:
        """Blocks that finished prefills keep for decode workers; None if that is what was told last."""
        leased = sum(self._leased.values())
        if leased == self._told_leased:
            return None
        self._told_leased = leased
        return leased

    # Producer.

    def arrived(self, request: Request) -> None:
        """A request has entered the engine."""
        if self._free_blocks is not None:
            self._free_blocks.sort()
        params = _params_of(request)
        if params is None or not params.do_remote_decode:
            return
        if not self._is_producer:
            _log.error("kvberth: request %s asks a decode worker to prefill for another one", request.request_id)
            return
        if request.prompt_token_ids is None:
            _log.warning("kvberth: request %s has no token ids; its KV is not handed over", request.request_id)
            return
        keys = params.keys(request.request_id)
        if not self._live_keys.isdisjoint(keys):
            _log.error("kvberth: request %s comes with the transfer id of another one", request.request_id)
            return
        self._producing[request.request_id] = keys
        self._prefills[request.request_id] = _Prefill(
            keys, int(request.num_prompt_tokens), self._settings.stream_during_prefill
        )
        self._live_keys.update(keys)
        announced = PrefillAnnounced(
            RequestId(request.request_id), request.num_prompt_tokens, _digest_of(request, request.prompt_token_ids)
        )
        self._commands.append(AnnouncePrefill(keys, announced))

    def scheduled(self, output: SchedulerOutput) -> list[AdvancePrefill]:
        """A step has been scheduled: what its forward pass will have computed of the requests that are handed over.

        A block counts when all its tokens are computed; the last, partial one when the prompt is.
        """
        if not self._prefills:
            return []
        for request_id in output.preempted_req_ids or ():
            if (prefill := self._prefills.get(request_id)) is not None:
                prefill.num_blocks, prefill.is_complete = 0, False
                self._commands.append(RestartPrefill(prefill.keys, PrefillRestarted()))
        before = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        advances = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            prefill = self._prefills.get(request_id)
            if prefill is not None and not prefill.is_complete:
                upto = min(before[request_id] + num_scheduled, prefill.num_tokens)
                self._commands.append(SchedulePrefill(prefill.keys, upto))
                block_ids = output.kv_connector_block_state.resolve_block_ids(request_id)[0]
                advance = prefill.advance(before[request_id] + num_scheduled, block_ids, self._block_size)
                if advance is not None:
                    advances.append(advance)
        return advances

    # Consumer.

    def tokens_to_load(self, request: Request, num_computed_tokens: int) -> int:
        """How many tokens beyond the local prefix come from the prefill worker. Free of side effects."""
        params = self._consumer_params(request)
        if params is None or request.prompt_token_ids is None:
            return 0
        if params.key(request.request_id) in self._live_keys:
            return 0
        return max(0, int(request.num_prompt_tokens) - num_computed_tokens)

    def allocated(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Blocks have been given to a request; the first `num_prompt_tokens - num_external_tokens` tokens are here.

        Args:
            block_ids: the request's whole block table.
        """
        params = self._consumer_params(request)
        if params is None:
            return
        # A request that comes here again (after preemption or a failed load) computes for itself.
        _clear_remote_prefill(request)
        key = params.key(request.request_id)
        if key in self._live_keys or request.prompt_token_ids is None:
            _log.error(
                "kvberth: request %s cannot take part in transfer %s; computing locally", request.request_id, key
            )
            return
        if num_external_tokens == 0:
            self._decline(params, key, Reason.NOT_NEEDED)
            return
        first_token = request.num_prompt_tokens - num_external_tokens
        start, stop = block_range(first_token, request.num_prompt_tokens, self._block_size)
        waiting = RequestWaiting(
            request_id=RequestId(request.request_id),
            attempt=params.attempt,
            mode=params.transfer_mode or self._settings.transfer_mode,
            first_token=first_token,
            num_tokens=request.num_prompt_tokens,
            prompt_digest=_digest_of(request, request.prompt_token_ids),
            blocks=tuple(block_ids[start:stop]),
        )
        assert params.remote_host is not None
        assert params.remote_port is not None
        self._awaiting[request.request_id] = key
        self._live_keys.add(key)
        self._commands.append(
            AwaitRequest(key, params.remote_host, params.remote_port, waiting, self._identity(params))
        )

    # Both.

    def ended(self, released: set[str], received: set[str], outcomes: dict[str, TransferOutcome]) -> None:
        """The movers of all ranks have let go of these requests."""
        for request_id in released:
            self._live_keys.difference_update(self._producing.pop(request_id))
            del self._leased[request_id]
        # Ranks report in steps of their own; a request is received when the last one has.
        for request_id, reported in outcomes.items():
            if request_id not in self._reported or not reported.ok:
                self._reported[request_id] = reported
        for request_id in received:
            outcome = self._reported.pop(request_id)
            if request_id in self._aborting:
                self._live_keys.discard(self._aborting.pop(request_id))
            else:
                self._live_keys.discard(self._awaiting.pop(request_id))
                self._outcomes[request_id] = outcome

    def finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, well or not.

        Returns:
            Whether its blocks must be kept until the movers let go of them, and what its response says.
        """
        request_id = request.request_id
        outcome = self._outcomes.pop(request_id, None)
        keys = self._producing.get(request_id)
        if keys is not None:
            self._prefills.pop(request_id, None)
            self._leased[request_id] = len(block_ids)
            return True, self._finish_prefill(request, keys, block_ids)
        if request_id in self._awaiting:
            self._aborting[request_id] = self._awaiting.pop(request_id)
            self._commands.append(AbortRequest(self._aborting[request_id]))
            return False, None  # vLLM keeps the blocks of a request that waits
        params = self._consumer_params(request)
        if params is not None:  # rejected or aborted before it was given blocks
            _clear_remote_prefill(request)
            for key in params.declined_keys(request_id):
                # A live one is that of a request which has been aborted itself: vLLM tells of a rejection then, too.
                if key not in self._live_keys:
                    self._decline(params, key, Reason.CONSUMER_GONE)
        if outcome is None:
            return False, None
        return False, {"transfer": outcome.for_response()}

    def _finish_prefill(
        self, request: Request, keys: tuple[TransferKey, ...], block_ids: list[int]
    ) -> dict[str, Any] | None:
        num_tokens = request.num_prompt_tokens
        if request.status not in _COMPLETE or request.num_computed_tokens < num_tokens:
            self._commands.append(EndPrefill(keys, PrefillAborted()))
            return None
        blocks = tuple(block_ids[: num_blocks_for(num_tokens, self._block_size)])
        self._commands.append(FinishPrefill(keys, PrefillFinished(blocks)))
        params = _params_of(request)
        assert params is not None
        return {
            **self._address,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": keys[0].transfer_id,
            "attempt": params.attempt,
            "num_consumers": len(keys),
            "transfer_mode": str(params.transfer_mode or self._settings.transfer_mode),
            "remote_request_id": request.request_id,
            "remote_num_tokens": num_tokens,
            # Routers and connectors that know vLLM's own take an empty list for "nothing to fetch".
            "remote_block_ids": [list(blocks)],
        }

    def _consumer_params(self, request: Request) -> TransferParams | None:
        params = _params_of(request)
        if params is None or not params.do_remote_prefill:
            return None
        if not self._is_consumer:
            _log.error("kvberth: request %s asks a prefill worker to decode for another one", request.request_id)
            return None
        return params

    def _decline(self, params: TransferParams, key: TransferKey, reason: Reason) -> None:
        assert params.remote_host is not None
        assert params.remote_port is not None
        declined = RequestDeclined(params.attempt, reason)
        self._commands.append(
            DeclineRequest(key, params.remote_host, params.remote_port, declined, self._identity(params))
        )

    def _identity(self, params: TransferParams) -> str:
        return params.producer_identity if self._has_keys else ""


def _params_of(request: Request) -> TransferParams | None:
    if not request.kv_transfer_params:
        return None
    try:
        return TransferParams.parse(request.kv_transfer_params)
    except ParamsError:
        _log.exception("kvberth: request %s is served without a handoff", request.request_id)
        request.kv_transfer_params = None
        return None


def _clear_remote_prefill(request: Request) -> None:
    assert request.kv_transfer_params is not None
    request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}


def _digest_of(request: Request, token_ids: list[int]) -> bytes:
    adapter = request.lora_request.lora_name if request.lora_request else ""
    images = [str(feature.identifier) for feature in request.mm_features or ()]
    return prompt_digest(token_ids, adapter, request.cache_salt or "", *images)
