"""`KVBerthConnector`: vLLM's hooks, passed on to the half that they belong to."""

import logging
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvberth.keys import PeerRole
from kvberth.protocol import PROTOCOL_VERSION
from kvberth.vllm_plugin.fingerprint import attention_backends, facts_of
from kvberth.vllm_plugin.meta import SchedulerMeta, WorkerMeta
from kvberth.vllm_plugin.metrics import LEASED_BLOCKS, KVBerthPromMetrics, KVBerthStats, stats_of
from kvberth.vllm_plugin.scheduler_side import SchedulerSide
from kvberth.vllm_plugin.settings import ConnectorSettings, SettingsError, is_loopback
from kvberth.vllm_plugin.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["KVBerthConnector"]

_log = logging.getLogger(__name__)


_SUPPORTED_VLLM = ("0.32", "0.33")


class KVBerthConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector that hands over by push and by pull, chosen per request, in the background.

    vLLM makes one in the scheduler and one in each worker. Settings: `kvberth.vllm_plugin.settings`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        settings = _settings_of(vllm_config)
        _check_supported(vllm_config, kv_cache_config)
        transfer_config = self._kv_transfer_config
        if transfer_config.is_kv_producer:
            settings.check_listening()
        keyring = settings.keyring()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            host, port = settings.dialled_at(_control_port(vllm_config))
            self._scheduler = SchedulerSide(
                settings,
                block_size=vllm_config.cache_config.block_size,
                is_producer=transfer_config.is_kv_producer,
                is_consumer=transfer_config.is_kv_consumer,
                engine_id=str(transfer_config.engine_id),
                host=host,
                port=port,
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
                public_key=keyring.own.certificate.public_key if keyring is not None else "",
            )
            if keyring is not None:
                own, peers = keyring.own.certificate, keyring.peers_dir
                _log.info("kvberth: the control channel's key is %s; %d peers in %s", own.name, len(keyring), peers)
                if own.role is not PeerRole.ENGINE:
                    raise SettingsError(f"kv_connector_extra_config: {own.name} is a {own.role}'s key, not an engine's")
            elif transfer_config.is_kv_producer and not is_loopback(settings.control_host):
                _log.warning(
                    "kvberth: the control channel on %s is not authenticated: whoever reaches it gets KV caches",
                    settings.control_host,
                )
            if transfer_config.is_kv_consumer and transfer_config.kv_load_failure_policy != "recompute":
                _log.info("kvberth: a failed transfer fails its request; kv_load_failure_policy 'recompute' mends it")
        else:
            self._worker = WorkerSide(
                settings,
                facts_of(vllm_config),
                engine_id=str(transfer_config.engine_id),
                rank=get_tensor_model_parallel_rank(),
                num_blocks=kv_cache_config.num_blocks,
                listen_port=_control_port(vllm_config) if transfer_config.is_kv_producer else None,
                keyring=keyring,
            )

    # Worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the memory and start the mover."""
        self._worker_side.register(kv_caches, attention_backends(self._vllm_config))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. `start_load_kv` would be later: vLLM calls it after the forward pass, which can be long."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, SchedulerMeta)
        self._worker_side.begin_step(connector_metadata.commands)

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        super().clear_connector_metadata()
        self._worker_side.end_step()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing: the mover has had its commands when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only after its KV has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: the mover takes the blocks from where they are."""

    def wait_for_save(self) -> None:
        """The forward pass has been launched: what it computes can be handed over as soon as it is done."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SchedulerMeta)
        self._worker_side.computed(meta.advances)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose blocks the mover has let go of, or whose KV has arrived or failed to."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SchedulerMeta)
        released, received, failed = self._worker_side.poll(has_forward=meta.has_forward)
        return KVConnectorTransferResults(finished_sending=released, finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """How the received requests fared."""
        outcomes = self._worker_side.take_outcomes()
        return WorkerMeta(outcomes) if outcomes else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What each half has to tell the metrics."""
        if self._worker is not None:
            return self._worker.take_stats()
        leased = self._scheduler_side.take_leased_blocks()
        return None if leased is None else stats_of([], now={LEASED_BLOCKS: leased})

    def shutdown(self) -> None:
        """Stop the mover."""
        if self._worker is not None:
            self._worker.stop()

    # Scheduler's half.

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """vLLM's own blocks."""
        self._scheduler_side.has_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        """A request has entered the engine."""
        self._scheduler_side.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """On a decode worker, the whole rest of the prompt comes from elsewhere."""
        tokens = self._scheduler_side.tokens_to_load(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The request has its blocks: tell where they are."""
        self._scheduler_side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Send what has come together to the workers."""
        has_forward = scheduler_output.total_num_scheduled_tokens > 0
        advances = self._scheduler_side.scheduled(scheduler_output)
        return SchedulerMeta(self._scheduler_side.take_commands(), advances, has_forward)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers have let go of requests."""
        worker_meta = connector_output.kv_connector_worker_meta
        outcomes = worker_meta.outcomes if isinstance(worker_meta, WorkerMeta) else {}
        self._scheduler_side.ended(
            connector_output.finished_sending or set(), connector_output.finished_recving or set(), outcomes
        )

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep a prefill worker's blocks for the decode worker."""
        return self._scheduler_side.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same; there is one group."""
        return self._scheduler_side.finished(request, block_ids[0])

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """All layers of a block side by side, so that a block is one descriptor and not one per layer.

        vLLM takes it as a wish: an attention backend that cannot have it, or VLLM_KV_CACHE_LAYOUT, decides otherwise.
        """
        return "BLHNC"

    # Metrics.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats from what has crossed a process."""
        return KVBerthStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVBerthPromMetrics:
        """In the API server's process."""
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        settings = _settings_of(vllm_config)
        keyring = settings.keyring()
        host, port = settings.dialled_at(_control_port(vllm_config))
        engine_info = {
            "role": str(transfer_config.kv_role),
            "engine_id": str(transfer_config.engine_id),
            "control_host": host,
            "control_port": str(port),
            "tp_size": str(vllm_config.parallel_config.tensor_parallel_size),
            "transfer_mode": str(settings.transfer_mode),
            "protocol_version": str(PROTOCOL_VERSION),
            "control_public_key": keyring.own.certificate.public_key if keyring is not None else "",
        }
        return KVBerthPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, engine_info)

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this connector was made for a worker"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "this connector was made for the scheduler"
        return self._worker


def _log_with_vllm() -> None:
    """What the parts without vLLM log goes where vLLM's own log goes, in its form."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvberth")
    ours.handlers, ours.level, ours.propagate = theirs.handlers, theirs.level, theirs.propagate


def _settings_of(vllm_config: VllmConfig) -> ConnectorSettings:
    assert vllm_config.kv_transfer_config is not None
    return ConnectorSettings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _control_port(vllm_config: VllmConfig) -> int:
    """Of rank 0 of this engine; data-parallel engines on one host follow each other."""
    assert vllm_config.kv_transfer_config is not None
    parallel = vllm_config.parallel_config
    return int(vllm_config.kv_transfer_config.kv_port + parallel.data_parallel_rank * parallel.tensor_parallel_size)


def _check_supported(vllm_config: VllmConfig, kv_cache_config: "KVCacheConfig") -> None:
    """Refuse at start what would go wrong later."""
    if not any(vllm.__version__.startswith(f"{release}.") for release in _SUPPORTED_VLLM):
        raise SettingsError(
            f"KVBerthConnector: vLLM is {vllm.__version__}; supported are {' and '.join(_SUPPORTED_VLLM)}"
        )
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise SettingsError(
            f"KVBerthConnector: the model has {len(kv_cache_config.kv_cache_groups)} groups of KV caches (hybrid or "
            "sliding-window attention); only models with one are supported"
        )
    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        raise SettingsError("KVBerthConnector: pipeline parallelism is not supported; set pipeline_parallel_size to 1")
