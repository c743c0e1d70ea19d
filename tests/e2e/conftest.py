"""Real engines for the end-to-end tests. They take half a minute to start, so tests share them."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.e2e.client import Client, Metrics, eventually

from kvberth.launch import ClusterSettings, EngineProcess, LocalCluster, Nurseries, PortLease, demo_model
from kvberth.launch.engine import EngineKind, Hardware

MODEL = "smollm2"
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is `e2e`, and may take its time."""
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))


class ClusterPool:
    """At most one cluster at a time: the machine has no memory for two. Asking for another one stops the first."""

    def __init__(self) -> None:
        self._cluster: LocalCluster | None = None
        self._nurseries = Nurseries()

    def get(self, settings: ClusterSettings) -> LocalCluster:
        """A running cluster with these settings, all of it alive."""
        if self._cluster is not None:
            is_whole = all(engine.is_alive and engine.is_ready() for engine in self._cluster.engines)
            if is_whole and self._cluster.settings == settings:
                return self._cluster
            self.close()
        self._cluster = LocalCluster(settings, Console(force_terminal=False), nurseries=self._nurseries).__enter__()
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
            self._cluster = None

    def end(self) -> None:
        self.close()
        self._nurseries.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[ClusterPool]:
    pool = ClusterPool()
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def settings() -> ClusterSettings:
    """One prefill worker, one decode worker, one undivided engine, in float32, where equal means equal."""
    return ClusterSettings(
        model=str(demo_model()),
        served_model_name=MODEL,
        undivided=1,
        dtype="float32",
        max_model_len=4096,
        block_size=32,
        prefix_caching=True,
        engine_args=("--enforce-eager", "--max-num-seqs", "16", *_TOOLS),
    )


@pytest.fixture
def cluster(pool: ClusterPool, settings: ClusterSettings) -> LocalCluster:
    return pool.get(settings)


@pytest.fixture
def cluster_without_caching(pool: ClusterPool, settings: ClusterSettings) -> LocalCluster:
    return pool.get(replace(settings, prefix_caching=False))


@pytest.fixture
def router(cluster: LocalCluster) -> Client:
    return Client(cluster.router_url, MODEL)


@pytest.fixture
def undivided(cluster: LocalCluster) -> Client:
    return Client(cluster.undivided[0].url, MODEL)


@pytest.fixture
def decode_metrics(cluster: LocalCluster) -> Metrics:
    return Metrics(cluster.decode[0].url)


@contextmanager
def decode_worker_beside(cluster: LocalCluster, run_dir: Path, **changes: object) -> Iterator[EngineProcess]:
    """Another decode worker for the cluster's prefill worker, unknown to the router, with other settings."""
    with PortLease() as ports:
        engine = EngineProcess(
            EngineKind.DECODE,
            9,
            replace(cluster.settings, **changes),  # type: ignore[arg-type]
            Hardware.detect(),
            num_engines=4,
            position=3,
            port=ports.take(),
            control_port=0,
            run_dir=run_dir,
            nurseries=cluster.nurseries,
            key_file=cluster.key_file(f"decode-{uuid.uuid4().hex}"),
        )
        engine.start()
        try:
            eventually(engine.is_ready, 300, "the other decode worker is ready")
            yield engine
        finally:
            engine.finish_stop()
