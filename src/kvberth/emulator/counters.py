"""Figures that cross processes: the ranks count, and the API server shows them in vLLM's own `/metrics`.

An engine's ranks live in other processes than its API server, and vLLM carries only its own figures between them. So
each rank has a row in a small file that all map: one writer per row, 8 bytes per figure, no lock.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["COUNTERS", "CounterFile", "EmulatorCollector"]

COUNTERS = {
    "corruptions": "KV contexts that held wrong words",
    "verified_tokens": "tokens whose words in all layers were verified at a context's first use",
    "written_tokens": "tokens whose words were written",
    "steps": "steps that were run",
    "busy_seconds": "time that the modelled device was busy",
    "late_seconds": "time by which results came later than the model says: the machine was too slow",
    "work_seconds": "time that writing and verifying words took on this machine",
}
_RANKS = 16
_SIZE = _RANKS * len(COUNTERS) * 8


class CounterFile:
    """The file, mapped. Create it in the API server; open it in the ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._rows = np.frombuffer(self._map, dtype=np.float64).reshape(_RANKS, len(COUNTERS))

    @classmethod
    def create(cls) -> "CounterFile":
        """A new file, full of zeros. It is unlinked by whoever calls `remove`."""
        handle, name = tempfile.mkstemp(prefix="kvberth-emulator-")
        with os.fdopen(handle, "wb") as file:
            file.truncate(_SIZE)
        return cls(Path(name))

    def add(self, rank: int, **amounts: float) -> None:
        """Add to a rank's figures. Only that rank does."""
        row = self._rows[rank]
        for name, amount in amounts.items():
            row[_INDEX[name]] += amount

    def read(self, rank: int) -> dict[str, float]:
        """A rank's figures."""
        return dict(zip(COUNTERS, self._rows[rank].tolist(), strict=True))

    def remove(self) -> None:
        """Unlink the file; those who have it mapped keep it."""
        self.path.unlink(missing_ok=True)


_INDEX = {name: index for index, name in enumerate(COUNTERS)}


class EmulatorCollector(Collector):
    """Shows the file to Prometheus: `kvberth:emulator_<name>_total` by rank, and gauges that say what this engine is.

    Args:
        counters: the file.
        ranks: rows in use.
        infos: gauges whose labels are what they say, by their names.
    """

    def __init__(self, counters: CounterFile, ranks: int, infos: Mapping[str, Mapping[str, str]]) -> None:
        self._counters = counters
        self._ranks = ranks
        self._infos = infos

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for."""
        for name, labels in self._infos.items():
            info = GaugeMetricFamily(name, "What this engine is.", labels=list(labels))
            info.add_metric(list(labels.values()), 1)
            yield info
        for name, help_text in COUNTERS.items():
            family = CounterMetricFamily(f"kvberth:emulator_{name}", f"Emulator: {help_text}.", labels=["rank"])
            for rank in range(self._ranks):
                family.add_metric([str(rank)], self._counters.read(rank)[name])
            yield family
