"""What the router counts. One registry per router, so that several can live in one process.

Requests are counted from their timelines when they have ended; only the times between chunks are added as they pass.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvberth.router import figures
from kvberth.router.breaker import BreakerState
from kvberth.router.engines import Engine
from kvberth.router.fleet import Fleet
from kvberth.router.tally import GAP_BOUNDS, Times
from kvberth.router.timeline import CLIENT_STALLED, Timeline, What

__all__ = ["Metrics"]

_BY = ("path", "binding")
_TO_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8)
_HANDOFF = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_WHOLE = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2)

# Name, description, buckets, and the figure: None where a timeline has none.
_Figure = Callable[[Timeline], float | None]
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], _Figure], ...] = (
    (
        "time_to_first_token_seconds",
        "From a streamed request's arrival to the first chunk of its answer",
        _TO_FIRST_TOKEN,
        figures.time_to_first_token,
    ),
    (
        "time_per_output_token_seconds",
        "(E2E latency - TTFT) / (output tokens - 1) of streams that came to their end",
        _PER_TOKEN,
        figures.time_per_output_token,
    ),
    (
        "e2e_latency_seconds",
        "From an answered request's arrival to the end of its answer",
        _WHOLE,
        figures.end_to_end,
    ),
    (
        "admission_wait_seconds",
        "From a request's arrival to its turn at the router; 0 for one that did not have to wait",
        _TO_FIRST_TOKEN,
        lambda timeline: timeline.waited_seconds,
    ),
    (
        "queue_seconds",
        "From a request's arrival to its prompt's first step; if that is not known, to its first leg",
        _TO_FIRST_TOKEN,
        figures.queue,
    ),
    (
        "bind_seconds",
        "From the moment that a decode worker is sent a request to its registration, where known",
        _HANDOFF,
        figures.bind,
    ),
    (
        "prefill_seconds",
        "From the prompt's first step, or if that is not known the leg's start, to the last step's end",
        _TO_FIRST_TOKEN,
        figures.prefill,
    ),
    (
        "transfer_seconds",
        "From the prefill's end to the arrival of all KV, where known",
        _HANDOFF,
        figures.transfer,
    ),
)

# Name, description, labels, and the labels' values for each time that a timeline counts.
_Times = Callable[[Timeline], Iterable[tuple[str, ...]]]
_COUNTERS: tuple[tuple[str, str, tuple[str, ...], _Times], ...] = (
    (
        "requests",
        "Requests answered, by the path of their KV cache and the status code (499: the client went away)",
        ("path", "code"),
        lambda timeline: [(timeline.path, str(timeline.status))],
    ),
    (
        "retries",
        "Failures of a leg that were hidden from the client",
        (*_BY, "leg", "reason"),
        lambda timeline: [(*_by(timeline), *retry) for retry in figures.retries(timeline)],
    ),
    (
        "client_disconnects",
        "Requests whose client went away, by what they were at",
        (*_BY, "phase"),
        lambda timeline: [(*_by(timeline), figures.last_phase(timeline))] if timeline.is_abandoned else [],
    ),
    (
        "client_stalls",
        "Those of them that were ended because their client did not read the answer",
        _BY,
        lambda timeline: [_by(timeline)] if timeline.error == CLIENT_STALLED else [],
    ),
    (
        "broken_streams",
        "Streams that had begun with 200 and ended with an error of the router's",
        _BY,
        lambda timeline: [_by(timeline)] if figures.is_broken(timeline) else [],
    ),
    (
        "continued_streams",
        "Times that a stream whose engine went away was sent on to another one",
        _BY,
        lambda timeline: [_by(timeline) for event in timeline.events if event.what is What.CONTINUED],
    ),
    (
        "undivided",
        "Requests that a decode worker served alone, by the reason",
        ("reason",),
        lambda timeline: [(reason,)] if (reason := figures.undivided_reason(timeline)) else [],
    ),
)


class Metrics:
    """The `kvberth_router_` metrics; labels are few and closed, so that no client can make them grow.

    The engines' own figures are taken when the page is read: those of a removed engine are not on it any more.
    """

    def __init__(self, fleet: Fleet, in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        self._histograms = [
            (_Histogram(name, description, buckets), figure) for name, description, buckets, figure in _HISTOGRAMS
        ]
        self._counters = {
            name: (Counter(_full(name), description, labels, registry=registry), times)
            for name, description, labels, times in _COUNTERS
        }
        for name, description, value in (
            ("requests_in_flight", "Requests that the router works on", in_flight),
            ("queued", "Requests that wait for their turn", queued),
        ):
            Gauge(_full(name), description, registry=registry).set_function(value)
        # `labels` takes longer than all else that is done for a counter.
        self._labelled = cache(Counter.labels)
        self._gaps = _Histogram("inter_token_latency_seconds", "Times between the chunks of streams", GAP_BOUNDS)
        for collector in (*(histogram for histogram, _ in self._histograms), self._gaps, _Engines(fleet)):
            registry.register(collector)

    def observe(self, timeline: Timeline) -> None:
        """Add a request that has ended."""
        by = _by(timeline)
        for histogram, figure in self._histograms:
            if (seconds := figure(timeline)) is not None:
                histogram.by[by].add(seconds)
        for counter, times in self._counters.values():
            for labels in times(timeline):
                self._labelled(counter, *labels).inc()

    def gaps(self, path: str, binding: str) -> Times:
        """Where a stream adds the times between its chunks."""
        return self._gaps.by[path, binding]

    def answered(self) -> Iterator[tuple[str, str, int]]:
        """Path, status code and number of the requests answered so far, the relayed ones included."""
        for family in self._counters["requests"][0].collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    yield sample.labels["path"], sample.labels["code"], int(sample.value)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)


def _full(name: str) -> str:
    return f"kvberth_router_{name}"


def _by(timeline: Timeline) -> tuple[str, str]:
    return timeline.path, timeline.binding


class _Histogram(Collector):
    """By path and binding. Costs a third of `prometheus_client.Histogram`, which takes two locks for each time."""

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self.by: defaultdict[tuple[str, str], Times] = defaultdict(lambda: Times(bounds))
        self._name = _full(name)
        self._description = description
        self._bounds = [*map(str, bounds), "+Inf"]

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._description, labels=_BY)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        for labels, times in self.by.items():
            counts = list(zip(self._bounds, accumulate(times.counts), strict=True))
            family.add_metric(labels, counts, times.total_seconds)
        yield family


# Name, description, and the figure: None where it is not known.
_ENGINE_FIGURES: tuple[tuple[str, str, Callable[[Engine], float | None]], ...] = (
    ("engine_up", "1 if the engine is healthy and has said who it is", lambda engine: float(engine.is_ready)),
    ("engine_draining", "1 if the engine gets no new requests", lambda engine: float(engine.is_draining)),
    ("engine_requests_in_flight", "Legs that this router has at the engine", lambda engine: engine.held.requests),
    (
        "engine_prompt_tokens_in_flight",
        "Estimated prompt tokens of the legs that this router has at the engine",
        lambda engine: engine.held.tokens,
    ),
    (
        "engine_requests_running",
        "Requests that the engine computed when it was last asked",
        lambda engine: engine.load.running if engine.load else None,
    ),
    (
        "engine_requests_waiting",
        "Requests that waited in the engine when it was last asked",
        lambda engine: engine.load.waiting if engine.load else None,
    ),
    (
        "engine_kv_usage_ratio",
        "Share of the engine's KV cache that was in use when it was last asked",
        lambda engine: engine.load.kv_usage if engine.load else None,
    ),
    (
        "breaker_open",
        "1 if the engine gets no requests because it failed several in a row",
        lambda engine: float(engine.breaker.state is not BreakerState.CLOSED),
    ),
)


class _Engines(Collector):
    """One series per figure and engine that is there now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        engines = [(engine.role.word if engine.role else "unknown", engine) for engine in self._fleet.engines]
        for name, description, figure in _ENGINE_FIGURES:
            family = GaugeMetricFamily(_full(name), description, labels=["role", "engine"])
            for role, engine in engines:
                if (value := figure(engine)) is not None:
                    family.add_metric([role, engine.url], value)
            yield family
