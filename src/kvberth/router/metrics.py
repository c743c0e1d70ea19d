"""What the router counts. One registry per router, so that several can live in one process."""

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvberth.router.engines import Engine

__all__ = ["Metrics"]

# From a short prompt on an idle engine to a long queue.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)


class Metrics:
    """The `kvberth_router_` metrics; labels are few and closed, so that no client can make them grow."""

    def __init__(self, engines: Iterable[Engine], in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
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
        self.undivided = Counter(
            "kvberth_router_undivided",
            "Requests that a decode worker served alone, by the reason",
            ["reason"],
            registry=self.registry,
        )
        up = Gauge(
            "kvberth_router_engine_up",
            "1 if the engine is healthy and has said who it is",
            ["role", "url"],
            registry=self.registry,
        )
        for engine in engines:
            up.labels(engine.role.name.lower(), engine.url).set_function(partial(_is_up, engine))

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


def _is_up(engine: Engine) -> float:
    return float(engine.is_ready)
