"""What the engines' own counters say of a cell, in one form for kvberth's connector and vLLM's. Pure."""

from collections.abc import Sequence

import msgspec

from kvberth.compare.counters import Counters
from kvberth.compare.modes import is_divided
from kvberth.compare.store import MeasuredCell

__all__ = ["Breakdown", "EngineFigures", "engine_figures"]

_QUEUE, _PREFILL = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the mean time to first token went, in milliseconds.

    Attributes:
        queue, prefill: of the engine that reads the prompt, by its own clock.
        transfer: what of it lies behind the prefill. kvberth's modes: from the end of the prefill to the end of the
            handoff. vLLM's: posting and moving, by NIXL's clock; vLLM tells no more.
        first_step: of the decode worker, from scheduling to the first token.
        rest: what remains: HTTP, JSON, tokenizing, the router, the setup of the handoff, and waits between all these.
    """

    queue: float
    prefill: float
    transfer: float
    first_step: float
    rest: float


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Sums and means over the repetitions of a cell; None is what its engines do not count.

    Attributes:
        transfers: that completed and moved something.
        reserved_block_seconds: sum.
        post_ms, transfer_ms: means per transfer; the latter is NIXL's clock, of vLLM's connectors.
        after_prefill_ms: mean per transfer, of kvberth's.
        queue_ms, prefill_ms: means of the engine that reads prompts.
        cached_share: of the prompts' tokens, from 0 to 1, what that engine's prefix cache had; None without one.
        first_step_ms: mean of the decode worker; None where one engine does both.
        emulator_late_share: how late the steps of an emulated accelerator were in all, over the time that they should
            have taken; of the engine that makes tokens. The machine had no processor free for it.
    """

    corruptions: int | None = None
    preemptions: int | None = None
    transfers: int | None = None
    transfers_failed: int | None = None
    reserved_block_seconds: float | None = None
    descriptors_per_transfer: float | None = None
    bytes_per_transfer: float | None = None
    post_ms: float | None = None
    transfer_ms: float | None = None
    after_prefill_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    cached_share: float | None = None
    first_step_ms: float | None = None
    emulator_late_share: float | None = None
    is_divided: bool = True

    def breakdown(self, mean_ttft_ms: float) -> Breakdown | None:
        """Of the mean time to first token; None where the engines are not known."""
        if self.queue_ms is None or self.prefill_ms is None:
            return None
        transfer = 0.0
        if self.is_divided:
            by_nixl = (self.transfer_ms or 0.0) + (self.post_ms or 0.0)
            transfer = by_nixl if self.after_prefill_ms is None else self.after_prefill_ms
        first_step = self.first_step_ms or 0.0
        rest = mean_ttft_ms - self.queue_ms - self.prefill_ms - transfer - first_step
        return Breakdown(
            queue=self.queue_ms,
            prefill=self.prefill_ms,
            transfer=transfer,
            first_step=first_step,
            # Means of two clocks: below zero is rounding, or a transfer that overlapped with what is counted already.
            rest=max(0.0, rest),
        )

    def busy_ms(self, *, is_streamed: bool) -> float:
        """How long a transfer can disturb others on the decode worker, on average.

        Args:
            is_streamed: blocks arrive during the prefill already.
        """
        if self.after_prefill_ms is None:
            return (self.transfer_ms or 0.0) + (self.post_ms or 0.0)
        return self.after_prefill_ms + (self.prefill_ms or 0.0 if is_streamed else 0.0)


def engine_figures(repetitions: Sequence[MeasuredCell]) -> EngineFigures:
    """What was counted in one cell of one mode."""
    names = {name for each in repetitions for name in each.counters}
    total = {name: sum(each.counters.get(name, 0.0) for each in repetitions) for name in names}
    if not total:
        return EngineFigures()
    divided = is_divided(repetitions[0].mode)
    reader = "prefill" if divided else "decode"
    has_vllm = any("vllm:nixl" in name for name in total)
    emulated = any("emulator_corruptions" in name for name in total)
    descriptors = "vllm:nixl_num_descriptors" if has_vllm else "kvberth:transfer_descriptors"
    post = "vllm:nixl_post_time_seconds" if has_vllm else "kvberth:post_seconds"
    failed = (
        _sum(total, "vllm:nixl_num_failed_transfers_total") + _sum(total, "vllm:nixl_num_kv_expired_reqs_total")
        if has_vllm
        else _sum(total, "kvberth:transfers_not_completed")
    )
    moved = "vllm:nixl_bytes_transferred_sum" if has_vllm else "kvberth:transfer_bytes_total"
    transfers = _sum(total, f"{descriptors}_count")
    asked = _sum(total, "vllm:prefix_cache_queries_total", reader)
    busy = _sum(total, "kvberth:emulator_busy_seconds_total", "decode")
    return EngineFigures(
        corruptions=round(_sum(total, "kvberth:emulator_corruptions_total")) if emulated else None,
        preemptions=round(_sum(total, "vllm:num_preemptions_total")),
        transfers=round(transfers) if divided else None,
        transfers_failed=round(failed) if divided else None,
        reserved_block_seconds=(
            _sum(total, "kvberth:reserved_block_seconds_total") if divided and not has_vllm else None
        ),
        descriptors_per_transfer=_mean(total, descriptors),
        bytes_per_transfer=_sum(total, moved) / transfers if transfers else None,
        post_ms=_ms(_mean(total, post)),
        transfer_ms=_ms(_mean(total, "vllm:nixl_xfer_time_seconds")),
        after_prefill_ms=_ms(_mean(total, "kvberth:after_prefill_seconds")),
        queue_ms=_ms(_mean(total, _QUEUE, reader)),
        prefill_ms=_ms(_mean(total, _PREFILL, reader)),
        cached_share=_sum(total, "vllm:prefix_cache_hits_total", reader) / asked if asked else None,
        first_step_ms=_ms(_mean(total, _PREFILL, "decode")) if divided else None,
        emulator_late_share=_sum(total, "kvberth:emulator_late_seconds_total", "decode") / busy if busy else None,
        is_divided=divided,
    )


def _sum(total: Counters, name: str, kind: str | None = None) -> float:
    """Over the engines of a kind, or over all."""
    return sum(value for key, value in total.items() if _is(key, name, kind))


def _mean(total: Counters, name: str, kind: str | None = None) -> float | None:
    """Of a histogram; None if nothing was observed."""
    count = _sum(total, f"{name}_count", kind)
    return _sum(total, f"{name}_sum", kind) / count if count else None


def _is(key: str, name: str, kind: str | None) -> bool:
    of_kind, _, of_name = key.partition("/")
    return of_name == name and kind in (None, of_kind)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
