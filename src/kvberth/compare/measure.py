"""One cluster's turn: started, warmed up, its cells measured one after another, stopped."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvberth import bench
from kvberth.compare.counters import difference, read_counters
from kvberth.compare.journal import read_handoffs
from kvberth.compare.modes import Mode, cluster_settings
from kvberth.compare.plan import Cell, Memory, Run
from kvberth.compare.settings import CompareSettings
from kvberth.compare.store import Folder, MeasuredCell, now
from kvberth.compare.traffic import cell_plan, fragmenting_plan, greeting_plan, prefix_plan, settling_plan
from kvberth.launch import LocalCluster, Nurseries

__all__ = ["Deployment", "deployment", "measure_cells"]

_SETTLE_SECONDS = 0.5
"""An engine's figures follow its work by some steps."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where a mode answers.

    Attributes:
        cluster: None for one that was attached.
    """

    url: str
    cluster: LocalCluster | None = None

    def counters(self) -> dict[str, float]:
        """What its engines have counted so far; nothing is known of those of an attached one."""
        return read_counters(self.cluster.engines) if self.cluster is not None else {}

    def handoffs(self, request_ids: set[str]) -> dict[str, float]:
        """How long each of these waited behind its prefill; nothing is known of attached ones."""
        return read_handoffs(self.url, request_ids) if self.cluster is not None else {}

    def check(self) -> None:
        """Raises `LaunchError` if a process of it has died."""
        if self.cluster is not None:
            self.cluster.check()


@contextmanager
def deployment(settings: CompareSettings, run: Run, folder: Folder, nurseries: Nurseries) -> Iterator[Deployment]:
    """The run's cluster, for as long as the block lasts; or the attached one.

    Raises:
        LaunchError: it did not start.
    """
    if settings.attach:
        yield Deployment(settings.attach[run.mode])
        return
    wanted = cluster_settings(
        Mode(run.mode),
        model=settings.model,
        emulate=settings.emulate,
        emulate_link=settings.emulate_link,
        prefix_caching=run.group.prefix_caching,
        engine_args=(*settings.engine_args, *run.group.engine_args),
    )
    logs = folder.log_path / run.name
    with LocalCluster(replace(wanted, run_dir=logs), nurseries=nurseries) as cluster:
        yield Deployment(cluster.router_url, cluster)


def measure_cells(
    settings: CompareSettings,
    run: Run,
    cells: Sequence[Cell],
    where: Deployment,
    folder: Folder,
    on_cell: Callable[[Cell], None],
) -> None:
    """Measure `cells` in their order; each is on disk once it is whole.

    Args:
        on_cell: called when one is done.

    Raises:
        LaunchError: a process of the cluster has died.
        TargetError: it does not answer, or fails the traffic before the first cell.
        FolderError: the disk does not take it.
    """
    traffic = _Traffic(settings, run, where)
    traffic.prepare(cells)
    for cell in cells:
        traffic.prepare_cell(cell)
        _measure_cell(settings, run, cell, where, folder)
        on_cell(cell)


def _measure_cell(settings: CompareSettings, run: Run, cell: Cell, where: Deployment, folder: Folder) -> None:
    plan = cell_plan(settings, cell, run.repetition)
    started = now()
    before = where.counters()
    file = folder.open_cell(run.key(cell))
    try:
        result = _send(plan, where.url, file.write)
        if where.cluster is not None:
            time.sleep(_SETTLE_SECONDS)
        counted = difference(where.counters(), before)
        handoffs = where.handoffs({record.request_id for record in result.records})
        where.check()
        file.finish(
            MeasuredCell(
                cell=cell,
                mode=run.mode,
                repetition=run.repetition,
                started=started,
                counters=counted,
                handoffs_ms=handoffs,
                idle_share=result.summary.idle_share,
                warnings=result.summary.warnings,
                num_engines=len(where.cluster.engines) if where.cluster is not None else 0,
            )
        )
    finally:
        file.abandon()


@dataclass(slots=True)
class _Traffic:
    """What is sent around the cells, and not measured."""

    settings: CompareSettings
    run: Run
    where: Deployment
    is_fragmented: bool = False

    def prepare(self, cells: Sequence[Cell]) -> None:
        """After the start: make the acquaintance of all engines, and bring memory to its steady state."""
        self._send(greeting_plan(self.settings, self.run.repetition))
        if all(cell.memory is Memory.STEADY for cell in cells) and self.settings.warmup_requests:
            self._send(settling_plan(self.settings, cells, self.run.repetition))

    def prepare_cell(self, cell: Cell) -> None:
        """Before a cell: the memory and the caches that it is about."""
        if cell.memory is Memory.FRAGMENTED and not self.is_fragmented:
            self._send(fragmenting_plan(self.settings, self.run.repetition))
            self.is_fragmented = True
        if cell.shared_tokens:
            self._send(prefix_plan(self.settings, cell, self.run.repetition))

    def _send(self, plan: bench.Plan) -> None:
        failed = [record.error for record in _send(plan, self.where.url, lambda _: None).records if record.error]
        if failed:
            self.where.check()
            raise bench.TargetError(f"{len(failed)} of {len(plan.requests)} warm-up requests failed: {failed[0]}")


def _send(plan: bench.Plan, url: str, on_record: Callable[[bench.RequestRecord], None]) -> bench.RunResult:
    return bench.run_blocking(plan, bench.Target(url=url), on_record=on_record)
