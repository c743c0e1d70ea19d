"""How busy an engine is: what its own `/metrics` say, and what the router measures of it. No I/O and no clock."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

__all__ = ["LOAD_METRICS", "EngineLoad", "Held", "OwnPrompts", "PrefillRate", "parse_load", "samples_of"]

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_CACHE_CONFIG = "vllm:cache_config_info"
_PREFIX_CACHING = "enable_prefix_caching"
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_COMPUTED_HERE = "local_compute"

LOAD_METRICS = (_RUNNING, _WAITING, _KV_USAGE, _CACHE_CONFIG, _PROMPT_TOKENS)
"""The metrics that `parse_load` reads."""

# Over how long prompts are counted that an engine computes.
_WINDOW_SECONDS = 1.0
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
    prefix cache is on. `computed_tokens` counts the tokens of prompts that it has computed itself.
    """

    read_at: float
    held: Held
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int | None
    keeps_prefixes: bool = False
    computed_tokens: int = 0


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
        computed_tokens=_computed_tokens(samples),
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


def _computed_tokens(samples: Iterable[Sample]) -> int:
    values = [sample.value for sample in samples if sample.labels.get("source") == _COMPUTED_HERE]
    return round(sum(value for value in values if 0 <= value < float("inf")))


class OwnPrompts:
    """How many tokens of prompts an engine computes itself, from its readings of the last second or two.

    A decode worker's steps take long while it does.
    """

    __slots__ = ("_readings",)

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    @property
    def tokens_per_second(self) -> float:
        """0 where nothing is known."""
        if not self._readings:
            return 0.0
        (since, before), (until, tokens) = self._readings[0], self._readings[-1]
        return (tokens - before) / max(until - since, _WINDOW_SECONDS)

    def add(self, load: EngineLoad) -> None:
        if self._readings and load.computed_tokens < self._readings[-1][1]:
            self._readings.clear()  # it counts from the beginning
        self._readings.append((load.read_at, load.computed_tokens))
        while len(self._readings) > 1 and self._readings[1][0] <= load.read_at - _WINDOW_SECONDS:
            self._readings.popleft()


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
