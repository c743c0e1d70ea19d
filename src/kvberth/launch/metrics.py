"""What an engine's own `/metrics` says about transfers, for demo, tests and comparisons."""

import time
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

__all__ = ["EngineMetrics", "MetricsPage", "Moved"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a decode worker has received.

    Attributes:
        completed: transfers that ended well and moved something.
        other: transfers that ended otherwise.
        num_bytes, num_descriptors: of the completed ones.
    """

    completed: float
    other: float
    num_bytes: float
    num_descriptors: float


class MetricsPage:
    """What was read at one moment."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series of the sample `name` that have these labels; 0 if there are none."""
        return sum(each.value for each in self._samples if each.name == name and labels.items() <= each.labels.items())


class EngineMetrics:
    """One engine's metrics, read anew at each call."""

    def __init__(self, url: str) -> None:
        self._url = url

    def value(self, name: str, **labels: str) -> float:
        """As `MetricsPage.value`, of a page of its own."""
        return self.page(name).value(name, **labels)

    def moved(self) -> Moved:
        """What this decode worker has received since it started."""
        page = self.page("kvberth:transfer")
        ended = page.value("kvberth:transfers_total", role="consumer")
        completed = page.value("kvberth:transfers_total", role="consumer", end="completed", reason="none")
        return Moved(
            completed,
            ended - completed,
            page.value("kvberth:transfer_bytes_total", role="consumer"),
            page.value("kvberth:transfer_descriptors_sum", role="consumer"),
        )

    def moved_since(self, before: Moved, transfers: int, timeout_seconds: float = 5.0) -> Moved:
        """The difference, once `transfers` more have ended; an engine's figures follow its work by some steps."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            now = self.moved()
            ended = now.completed + now.other - before.completed - before.other
            if ended >= transfers or time.monotonic() > deadline:
                return Moved(
                    now.completed - before.completed,
                    now.other - before.other,
                    now.num_bytes - before.num_bytes,
                    now.num_descriptors - before.num_descriptors,
                )
            time.sleep(0.05)

    def page(self, *prefixes: str) -> MetricsPage:
        """One reading of the samples whose names begin with one of these; there are thousands of others.

        Raises:
            OSError: the engine does not answer.
        """
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:  # noqa: S310 - our own URL
            text = answer.read().decode()
        wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(prefixes))
        return MetricsPage([sample for family in text_string_to_metric_families(wanted) for sample in family.samples])
