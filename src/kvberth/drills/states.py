"""What an engine holds, and what it must not hold any more when a drill is over. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvberth.launch.metrics import MetricsPage
from kvberth.protocol import End, Reason

__all__ = [
    "STATE_METRICS",
    "EngineState",
    "MemoryPressure",
    "ProcessState",
    "engine_state",
    "failed_handoffs",
    "growth",
    "held_blocks",
    "leftovers",
    "new_corruptions",
]

_USAGE, _LEASED, _CORRUPTIONS, _TRANSFERS = (
    "vllm:kv_cache_usage_perc",
    "kvberth:leased_blocks",
    "kvberth:emulator_corruptions_total",
    "kvberth:transfers_total",
)
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
STATE_METRICS = (_USAGE, _LEASED, *_REQUESTS, _CORRUPTIONS, _TRANSFERS)
"""What `engine_state` reads."""
_MOVED_ON = (Reason.PREFILL_ABORTED, Reason.NEWER_ATTEMPT, Reason.HANDED_OVER)

_THREADS_SLACK, _FILES_SLACK = 8, 24
"""Threads of a pool that had no work before, connections that are kept for a while. What leaks in every drill grows
past them, since each drill is compared with the state before the first."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine, by its own `/metrics`.

    Attributes:
        held_blocks: blocks of the KV cache that are not free.
        leased_blocks: those of them that wait for a decode worker.
        requests: running and waiting.
        corruptions: KV contexts that held wrong words, since its start.
        failed_handoffs: transfers to this engine that failed, since its start, but for those that fail between healthy
            engines too: the prefill was aborted, as when a client leaves, or preempted, or the router had given up
            waiting for another decode worker just when that one got the KV cache.
    """

    held_blocks: int
    leased_blocks: int
    requests: int
    corruptions: int
    failed_handoffs: int


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """How full an engine's KV cache is, by its own `/metrics`.

    Attributes:
        usage: from 0 to 1.
        waiting: requests that wait for blocks or a place.
        preemptions: since its start.
    """

    usage: float
    waiting: float
    preemptions: float


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One engine or the router with its family, by the kernel.

    Attributes:
        pid: of the process itself; another one is another start.
    """

    pid: int
    threads: int
    files: int
    rss_bytes: int


def engine_state(page: MetricsPage, num_blocks: int) -> EngineState:
    """What an engine with a KV cache of so many blocks says of itself."""
    failed = {"role": "consumer", "end": End.FAILED}
    moved_on = sum(page.value(_TRANSFERS, **failed, reason=each) for each in _MOVED_ON)
    return EngineState(
        held_blocks=round(page.value(_USAGE) * num_blocks),
        leased_blocks=int(page.value(_LEASED)),
        requests=int(sum(page.value(each) for each in _REQUESTS)),
        corruptions=int(page.value(_CORRUPTIONS)),
        failed_handoffs=int(page.value(_TRANSFERS, **failed) - moved_on),
    )


def held_blocks(states: Mapping[str, EngineState]) -> int:
    """Of all engines."""
    return sum(state.held_blocks for state in states.values())


def new_corruptions(before: Mapping[str, EngineState], after: Mapping[str, EngineState]) -> int:
    """Of all engines."""
    return sum(_more(before[name].corruptions if name in before else 0, now.corruptions) for name, now in after.items())


def failed_handoffs(healed: Mapping[str, EngineState], after: Mapping[str, EngineState]) -> list[str]:
    """What decode workers had to compute themselves although the cluster was whole: the fault has left damage."""
    found = []
    for name, now in after.items():
        if count := _more(healed[name].failed_handoffs if name in healed else 0, now.failed_handoffs):
            found.append(f"{count} handoffs to {name} failed although all was well again")
    return found


def _more(before: int, after: int) -> int:
    """How much a count has grown. That of an engine that was started anew meanwhile begins at 0."""
    return after - before if after >= before else after


def leftovers(states: Mapping[str, EngineState]) -> list[str]:
    """What is still held although nothing is asked for."""
    return [
        f"{name} holds {state.held_blocks} blocks ({state.leased_blocks} leased) and {state.requests} requests"
        for name, state in states.items()
        if state.held_blocks or state.leased_blocks or state.requests
    ]


def growth(before: Mapping[str, ProcessState], after: Mapping[str, ProcessState]) -> list[str]:
    """Threads and open files that have come and not gone, by processes that have lived on meanwhile."""
    found = []
    for name, now in after.items():
        then = before.get(name)
        if then is None or then.pid != now.pid:
            continue
        for what, old, new, slack in (
            ("threads", then.threads, now.threads, _THREADS_SLACK),
            ("open files", then.files, now.files, _FILES_SLACK),
        ):
            if new > old + slack:
                found.append(f"{name} had {old} {what} before, and has {new}")
    return found
