"""The vLLM worker of the emulated accelerator: allocates the cache, launches steps on the stream, and answers.

Methods run on the engine's thread (or on the rank's, with more ranks than one), but for `_work` and what it calls,
which runs on the device's: contexts, canary and the rank's counters are that thread's alone.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized, get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from kvberth.emulator import nixl_agent
from kvberth.emulator.attention import EmulatedAttentionLayer
from kvberth.emulator.cache_view import words_of
from kvberth.emulator.canary import Canary
from kvberth.emulator.contexts import Contexts, StepPlan, StepResult
from kvberth.emulator.counters import CounterFile
from kvberth.emulator.messages import plan_of
from kvberth.emulator.platform import EmulatedPlatform, profile_of
from kvberth.emulator.profile import HEAD_SLOTS
from kvberth.emulator.scrub import Scrubber
from kvberth.emulator.settings import EmulatorSettings
from kvberth.emulator.stream import Device, LaunchedStep, Stream
from kvberth.emulator.timing import Step, step_seconds
from kvberth.emulator.versions import adopt_layout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["EmulatedWorker"]

logger = init_logger("vllm.kvberth.emulator")

_FIRST_COST_SECONDS_PER_WORD = 3e-9
"""Until it has been measured."""
_COST_WEIGHT = 0.2
"""Of the newest measurement in the running mean of the work's cost."""


class EmulatedWorker(WorkerBase):
    """One rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._profile = profile_of(self.vllm_config)
        self._settings = EmulatorSettings.of(self.vllm_config.additional_config)
        self._stream: Stream[StepResult] = Stream()
        EmulatedPlatform.stream = self._stream
        self._device: Device[StepResult] | None = None
        self._scrubber: Scrubber | None = None
        self._launched: _Output | None = None
        self._counters: CounterFile | None = None
        self._cost_per_word = _FIRST_COST_SECONDS_PER_WORD
        self._reported = (0.0, 0.0)

    def init_device(self) -> None:
        """No device: the ranks' group, and the wrapper of the transfer library."""
        self.device = torch.device("cpu")
        torch.set_num_threads(1)
        nixl_agent.install(self._settings, self._profile, self.parallel_config.world_size)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        if self.parallel_config.world_size > 1:
            # Of its own, since the device's thread uses it beside the engine's.
            self._ranks = torch.distributed.new_group(backend="gloo")
        if self._settings.counters:
            self._counters = CounterFile(Path(self._settings.counters))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """No weights: one stand-in per layer."""
        context = self.compilation_config.static_forward_context
        for index in range(self._profile.model.layers):
            layer = EmulatedAttentionLayer(self._profile, self.parallel_config.tensor_parallel_size)
            context[f"model.layers.{index}.self_attn.attn"] = layer

    def get_model(self) -> torch.nn.Module:
        """An empty module."""
        return torch.nn.Module()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation."""
        return ("generate",)

    def get_kv_cache_spec(self) -> "dict[str, KVCacheSpec]":
        """Of every layer."""
        return {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self._layers().items()}

    def set_kv_cache_layout(self, kv_cache_layout: str, cp_kv_cache_interleave_size: int | None = None) -> None:
        """Adopt the layout that the engine has chosen."""
        adopt_layout(self.vllm_config, kv_cache_layout, cp_kv_cache_interleave_size)

    def determine_available_memory(self) -> int:
        """Bytes for this rank's cache."""
        ranks = int(self.parallel_config.tensor_parallel_size)
        return self._profile.engine.kv_cache_tokens * self._profile.emulated_token_bytes // ranks

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Allocate the cache, and register it with the connector."""
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        layout = self.cache_config.get_resolved_kv_cache_layout()
        caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        for name, layer in self._layers().items():
            layer.bind_kv_cache(caches[name])
        slots = HEAD_SLOTS // self.parallel_config.tensor_parallel_size
        ordered = [caches[name] for name in self._layers()]
        canary = Canary(words_of(ordered), first_slot=slots * get_tp_group().rank_in_group)
        self._words_per_token = canary.words_per_token
        self._scrubber = Scrubber(canary.spoil) if self._nobody_wants_finished_blocks() else None
        self._contexts = Contexts(
            canary,
            self.cache_config.block_size,
            reduce_error=self._reduce_error if get_tp_group().world_size > 1 else None,
        )
        self._device = Device(self._stream)
        self._device.start()
        if has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(caches)

    def _layers(self) -> dict[str, EmulatedAttentionLayer]:
        context = self.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, EmulatedAttentionLayer)}

    def _nobody_wants_finished_blocks(self) -> bool:
        transfer = self.kv_transfer_config
        only_consumes = transfer is not None and transfer.kv_role == "kv_consumer"
        return only_consumes and not self.cache_config.enable_prefix_caching

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        """What the connector wants its peers to know."""
        if not has_kv_transfer_group():
            return None
        metadata = get_kv_transfer_group().get_handshake_metadata()
        return None if metadata is None else {(0, get_tp_group().rank_in_group): metadata}

    def execute_model(self, scheduler_output: "SchedulerOutput") -> "ModelRunnerOutput | None":
        """Launch a step; `sample_tokens` follows and returns what it will answer."""
        plan = plan_of(scheduler_output)
        if self._scrubber is not None:
            # Before the connector may let anything be put into these blocks.
            self._scrubber.before_step(plan)
        if not plan.chunks:
            if plan.finished:
                self._stream.launch(0.0, self._work(plan))
            if not has_kv_transfer_group():
                return ModelRunnerOutput(req_ids=[], req_id_to_index={})
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduler_output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output) as connector_output,
        ):
            duration = step_seconds(self._profile.timing, Step.of(plan.chunks))
            step = self._stream.launch(duration, self._work(plan), self._expected_cost(plan))
        if self._scrubber is not None:
            self._scrubber.after_launch(plan, step.event())
        self._launched = _Output(step, connector_output)
        return None

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> "ModelRunnerOutput | AsyncModelRunnerOutput":
        """The answer of the step that was launched last: a promise of it where vLLM schedules ahead."""
        output, self._launched = self._launched, None
        if output is None:
            raise RuntimeError("sample_tokens without a step")
        return output if self.scheduler_config.async_scheduling else output.get_output()

    def synchronize_device(self) -> None:
        """Wait for all steps."""
        self._stream.record().synchronize()

    def execute_dummy_batch(self) -> None:
        """One step of one sequence."""
        self._stream.launch(step_seconds(self._profile.timing, Step(sequences=1)), self._work(StepPlan())).result()

    def shutdown(self) -> None:
        """End the device's thread."""
        if self._device is not None:
            self._device.stop()

    def _work(self, plan: StepPlan) -> Callable[[], StepResult]:
        def work() -> StepResult:
            begin = time.perf_counter()
            result = self._contexts.run(plan)
            self._count(result, time.perf_counter() - begin)
            return result

        return work

    def _expected_cost(self, plan: StepPlan) -> float:
        tokens = sum(count for _, count in plan.chunks) + sum(each.computed for each in plan.arrivals)
        return tokens * self._words_per_token * self._cost_per_word

    def _count(self, result: StepResult, seconds: float) -> None:
        words = (result.verified_tokens + result.written_tokens) * self._words_per_token
        if words:
            self._cost_per_word += _COST_WEIGHT * (seconds / words - self._cost_per_word)
        for found in result.found:
            logger.error("KV corruption in request %s: %s", found.request_id, found.corruption)
        if self._counters is None:
            return
        before, self._reported = self._reported, (self._stream.busy_seconds, self._stream.late_seconds)
        self._counters.add(
            self.rank,
            corruptions=len(result.found),
            verified_tokens=result.verified_tokens,
            written_tokens=result.written_tokens,
            steps=1 if result.request_ids else 0,
            busy_seconds=self._reported[0] - before[0],
            late_seconds=self._reported[1] - before[1],
            work_seconds=seconds,
        )

    def _reduce_error(self, error: int) -> int:
        """The sum of all ranks' findings, modulo 2**64, on each of them."""
        value = torch.tensor([np.uint64(error).astype(np.int64)], dtype=torch.int64)
        torch.distributed.all_reduce(value, group=self._ranks)
        return int(np.int64(value.item()).astype(np.uint64))


class _Output(AsyncModelRunnerOutput):
    """A promise: `get_output` waits until the device has done the step."""

    def __init__(self, step: LaunchedStep[StepResult], connector_output: KVConnectorOutput | None) -> None:
        self._step = step
        self._connector_output = connector_output

    def get_output(self) -> ModelRunnerOutput:
        """What the step has made."""
        result = self._step.result()
        return ModelRunnerOutput(
            req_ids=result.request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(result.request_ids)},
            sampled_token_ids=result.tokens,
            kv_connector_output=self._connector_output,
        )

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """vLLM 0.33 asks for it when `get_output` has failed."""
        return self._connector_output
