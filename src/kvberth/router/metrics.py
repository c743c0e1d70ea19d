"""What the router counts. One registry per router, so that several can live in one process."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvberth.router.breaker import BreakerState
from kvberth.router.engines import Engine
from kvberth.router.fleet import Fleet

__all__ = ["Metrics"]

# From a short prompt on an idle engine to a long queue.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)


class Metrics:
    """The `kvberth_router_` metrics; labels are few and closed, so that no client can make them grow.

    The engines' own figures are taken when the page is read: those of a removed engine are not on it any more.
    """

    def __init__(self, fleet: Fleet, in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvberth_router_requests",
            "Requests answered, by the path of their KV cache and the status code (499: the client went away)",
            ["path", "code"],
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "kvberth_router_time_to_first_token_seconds",
            "From a streamed request's arrival to the first bytes of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prefill_leg = Histogram(
            "kvberth_router_prefill_leg_seconds",
            "From the start of a prefill leg to its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        Gauge(
            "kvberth_router_requests_in_flight", "Requests that the router works on", registry=self.registry
        ).set_function(in_flight)
        Gauge("kvberth_router_queued", "Requests that wait for their turn", registry=self.registry).set_function(queued)
        self.queue_wait = Histogram(
            "kvberth_router_queue_wait_seconds",
            "From a request's arrival to its turn; 0 for one that did not have to wait",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.client_stalls = Counter(
            "kvberth_router_client_stalls",
            "Requests that were ended because their client did not read the answer",
            registry=self.registry,
        )
        self.retries = Counter(
            "kvberth_router_retries",
            "Failures of a leg that were hidden from the client",
            ["leg", "reason"],
            registry=self.registry,
        )
        self.client_disconnects = Counter(
            "kvberth_router_client_disconnects", "Requests whose client went away", registry=self.registry
        )
        self.broken_streams = Counter(
            "kvberth_router_broken_streams",
            "Streams that had begun with 200 when their engine went away",
            registry=self.registry,
        )
        self.continued_streams = Counter(
            "kvberth_router_continued_streams",
            "Streams whose engine went away and that went on at another one",
            registry=self.registry,
        )
        self.undivided = Counter(
            "kvberth_router_undivided",
            "Requests that a decode worker served alone, by the reason",
            ["reason"],
            registry=self.registry,
        )
        self.registry.register(_Engines(fleet))

    def answered(self) -> Iterator[tuple[str, str, int]]:
        """Path, status code and number of the requests answered so far, the relayed ones included."""
        for family in self.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    yield sample.labels["path"], sample.labels["code"], int(sample.value)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


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
            family = GaugeMetricFamily(f"kvberth_router_{name}", description, labels=["role", "engine"])
            for role, engine in engines:
                if (value := figure(engine)) is not None:
                    family.add_metric([role, engine.url], value)
            yield family
