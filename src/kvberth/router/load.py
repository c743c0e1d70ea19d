"""How busy an engine is: what its own `/metrics` say, and what the router measures of it. No I/O and no clock."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

__all__ = ["LOAD_METRICS", "EngineLoad", "Held", "PrefillRate", "parse_load", "samples_of"]

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_CACHE_CONFIG = "vllm:cache_config_info"
_PREFIX_CACHING = "enable_prefix_caching"

LOAD_METRICS = (_RUNNING, _WAITING, _KV_USAGE, _CACHE_CONFIG)
"""The metrics that `parse_load` needs."""

# The weight of the past in a new measurement: about the last ten legs count.
_DECAY = 0.9


class Held(msgspec.Struct, frozen=True):
    """What this router has at an engine: requests, and the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One reading of an engine's load.

    `held` is what this router had there when it asked: the difference to what it has now is not in the reading yet.
    `kv_capacity_tokens` is None where the engine does not say how many blocks it has. `keeps_prefixes` is whether its
    prefix cache is on.
    """

    read_at: float
    held: Held
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int | None
    keeps_prefixes: bool = False


def parse_load(metrics_text: str, *, read_at: float, held: Held) -> EngineLoad:
    """Find an engine's load in the text of its `/metrics`. Raises `ValueError` where a figure is absent or broken.

    An engine with several data-parallel ranks counts as one: requests and blocks are added up.
    """
    samples = samples_of(metrics_text, LOAD_METRICS)
    usages = _by_rank(samples, _KV_USAGE)
    return EngineLoad(
        read_at=read_at,
        held=held,
        running=round(sum(_by_rank(samples, _RUNNING).values())),
        waiting=round(sum(_by_rank(samples, _WAITING).values())),
        kv_usage=sum(usages.values()) / len(usages),
        kv_capacity_tokens=_kv_capacity(samples),
        keeps_prefixes=any(sample.labels.get(_PREFIX_CACHING) == "True" for sample in samples),
    )


def samples_of(metrics_text: str, names: Iterable[str]) -> list[Sample]:
    """The samples with these names. vLLM's page has thousands of lines, of which the parser sees only ours."""
    page = f"\n{metrics_text}\n"
    ours = "".join(line for name in names for line in _lines_of(page, name))
    return [sample for family in text_string_to_metric_families(ours) for sample in family.samples]


def _lines_of(page: str, name: str) -> Iterator[str]:
    start = page.find(f"\n{name}")
    while start >= 0:
        end = page.find("\n", start + 1)
        if page[start + 1 + len(name)] in "{ ":
            yield page[start + 1 : end + 1]
        start = page.find(f"\n{name}", end)


def _by_rank(samples: Iterable[Sample], name: str) -> dict[str, float]:
    values = {sample.labels.get("engine", ""): sample.value for sample in samples if sample.name == name}
    if not values:
        raise ValueError(f"/metrics has no {name}")
    if not all(0 <= value < float("inf") for value in values.values()):
        raise ValueError(f"/metrics has no usable value of {name}")
    return values


def _kv_capacity(samples: Iterable[Sample]) -> int | None:
    labels = {sample.labels.get("engine", ""): sample.labels for sample in samples if sample.name == _CACHE_CONFIG}
    try:
        return sum(int(each["num_gpu_blocks"]) * int(each["block_size"]) for each in labels.values()) or None
    except (KeyError, ValueError):  # vLLM writes "None" for what it does not know
        return None


class PrefillRate:
    """How fast an engine computes prompts, from the legs that ended there.

    A leg's share of the engine's time begins with the leg, or with the end of the leg before it if that is later: as if
    legs were computed one after another. Tokens and times are averaged apart, so that legs which end together (they
    were computed in one batch) need no care of their own.
    """

    __slots__ = ("_last_end", "_legs", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._legs = 0.0
        self._last_end = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """None until the first leg has ended."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    @property
    def tokens_per_leg(self) -> float | None:
        return self._tokens / self._legs if self._legs else None

    def add(self, tokens: int, *, started_at: float, ended_at: float) -> None:
        seconds = max(0.0, ended_at - max(started_at, self._last_end))
        self._last_end = ended_at
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + seconds
        self._legs = _DECAY * self._legs + 1
