"""The worker's half of the connector: it owns the mover of its rank and does nothing but pass on.

All methods are called by the worker's own thread between and around forward passes; none of them waits for a transfer.
"""

import logging
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from kvberth.keys import Keyring
from kvberth.layout import Fingerprint
from kvberth.mover import AdvancePrefill, Command, Mover, MoverFailed, TransferReport
from kvberth.protocol import EngineCard, Timeline
from kvberth.transport.nixl import MemoryType, NixlTransport
from kvberth.vllm_plugin.fence import make_fence
from kvberth.vllm_plugin.fingerprint import EngineFacts
from kvberth.vllm_plugin.meta import TransferOutcome
from kvberth.vllm_plugin.metrics import HEARTBEATS_MISSED, MOVER_QUEUE, KVBerthStats, stats_of
from kvberth.vllm_plugin.regions import regions_of, tokens_of
from kvberth.vllm_plugin.settings import ConnectorSettings

__all__ = ["WorkerSide"]

_log = logging.getLogger(__name__)

_IDLE_STEP_SECONDS = 0.005
"""How long a step that computes nothing waits for the mover: the most that a new request can be kept by it."""


class WorkerSide:
    """One rank's connector in the worker process.

    Args:
        settings: the connector's.
        facts: the engine's side of the fingerprint.
        engine_id: vLLM's.
        rank: tensor-parallel rank.
        num_blocks: of the KV cache.
        listen_port: of the control channel; None for an engine that is a consumer only.
        keyring: for the control channel; None where it is not authenticated.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineFacts,
        *,
        engine_id: str,
        rank: int,
        num_blocks: int,
        listen_port: int | None,
        keyring: Keyring | None = None,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._engine_id = engine_id
        self._rank = rank
        self._num_blocks = num_blocks
        self._listen_port = listen_port
        self._keyring = keyring
        self._device_type = "cpu"
        self._mover: Mover | None = None
        self._outcomes: dict[str, TransferOutcome] = {}
        self._reports: list[TransferReport] = []
        self._heartbeats_missed = 0
        self._has_news = False
        self._queue = self._told_queue = 0

    def register(self, kv_caches: Mapping[str, torch.Tensor], backends: Collection[str]) -> None:
        """Register the KV cache and start the mover.

        Args:
            kv_caches: a tensor per layer.
            backends: vLLM's names of the attention backends that use them.

        Raises:
            UnsupportedCacheError: the cache cannot be addressed.
            MoverFailed: the mover cannot start; the cause is chained.
        """
        regions = regions_of(kv_caches, self._num_blocks)
        self._device_type = next(iter(kv_caches.values())).device.type
        memory_type = MemoryType.HOST if self._device_type == "cpu" else MemoryType.DEVICE
        incarnation = uuid.uuid4().hex
        fingerprint = Fingerprint(
            **self._facts,
            num_layers=len(kv_caches),
            block_lengths=tuple(region.block_length for region in regions),
            tokens=tokens_of(kv_caches, self._num_blocks, self._facts["block_size"], backends),
        )

        def make_transport() -> NixlTransport:
            name = f"{self._engine_id}/{self._rank}/{incarnation}"
            transport = NixlTransport(name, memory_type, self._settings.backend)
            transport.register(regions, self._num_blocks)
            return transport

        def make_card(agent_metadata: bytes) -> EngineCard:
            return EngineCard(
                engine_id=self._engine_id,
                incarnation=incarnation,
                rank=self._rank,
                fingerprint=fingerprint,
                regions=regions,
                num_blocks=self._num_blocks,
                agent_metadata=agent_metadata,
            )

        listen = None if self._listen_port is None else (self._settings.control_host, self._listen_port + self._rank)
        self._mover = Mover(make_transport, make_card, listen, self._settings.timing, self._keyring)
        self._mover.start()
        _log.info(
            "kvberth: rank %d is ready: %d layers in %d regions of %d blocks%s",
            self._rank,
            len(kv_caches),
            len(regions),
            self._num_blocks,
            f", control channel at {listen[0]}:{listen[1]}" if listen else "",
        )

    def begin_step(self, commands: list[Command]) -> None:
        """Hand the step's commands to the mover, before the forward pass and not after it."""
        mover = self._running()
        mover.begin_step()
        for command in commands:
            mover.submit(command)

    def computed(self, advances: list[AdvancePrefill]) -> None:
        """Hand over what the forward pass that was just launched computes, behind a fence."""
        if advances:
            fence = make_fence(self._device_type)
            for advance in advances:
                self._running().submit(replace(advance, fence=fence))

    def end_step(self) -> None:
        """The step is over."""
        self._running().end_step()

    def poll(self, *, has_forward: bool) -> tuple[set[str], set[str], set[str]]:
        """What has ended since the last call: released, received (failed ones included), failed.

        An engine that only waits for transfers steps in a tight loop; there is nothing to lose then by waiting here
        for the mover's news, and a good part of two cores to win. But not right behind news: an engine that schedules
        ahead takes in what one step has said only when it has made the next one.
        """
        results = self._running().take(0.0 if has_forward or self._has_news else _IDLE_STEP_SECONDS)
        self._has_news = bool(results.received or results.released)
        failed: set[str] = set()
        for report in results.received:
            timeline = _plain(report.timeline) if report.timeline is not None else None
            outcome = TransferOutcome(report.ok, str(report.reason), report.detail, timeline)
            self._outcomes[report.request_id] = outcome
            if not report.ok:
                failed.add(str(report.request_id))
        self._reports += results.reports
        self._heartbeats_missed += results.heartbeats_missed
        self._queue = results.num_queued
        received = {str(report.request_id) for report in results.received}
        return {str(each) for each in results.released}, received, failed

    def take_outcomes(self) -> dict[str, TransferOutcome]:
        """How the requests that were received since the last call fared."""
        taken, self._outcomes = self._outcomes, {}
        return taken

    def take_stats(self) -> KVBerthStats | None:
        """What the metrics have to be told since the last call."""
        reports, self._reports = self._reports, []
        counts = {HEARTBEATS_MISSED: self._heartbeats_missed} if self._heartbeats_missed else {}
        now = {MOVER_QUEUE: self._queue} if self._queue != self._told_queue else {}
        self._heartbeats_missed, self._told_queue = 0, self._queue
        return stats_of(reports, counts=counts, now=now)

    def stop(self) -> None:
        """Stop the mover."""
        if self._mover is not None:
            self._mover.stop()

    def _running(self) -> Mover:
        if self._mover is None:
            raise MoverFailed("the KV cache has not been registered")
        return self._mover


def _plain(timeline: Timeline) -> dict[str, Any]:
    """For JSON, to the microsecond."""
    moments = {
        name: round(moment, 6)
        for name, moment in msgspec.structs.asdict(timeline).items()
        if isinstance(moment, int | float)
    }
    return {**moments, "writes": [[round(moment, 6), blocks] for moment, blocks in timeline.writes]}
