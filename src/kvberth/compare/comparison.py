"""Everything that a folder's records say, in one value: what summary.json holds and all reports are made of."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvberth.compare.modes import Mode, is_divided
from kvberth.compare.plan import groups, runs
from kvberth.compare.settings import CompareSettings
from kvberth.compare.store import Folder, Incident, Manifest, MeasuredCell
from kvberth.compare.summary import SCHEMA, CellSummary, Ratio, pooled, ratios_of, summarise_cell
from kvberth.compare.targets import Target, targets_of
from kvberth.compare.verdict import Bend, Verdict, bends_of, verdict_of

__all__ = ["Comparison", "Missing", "compute", "load", "to_json"]


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """What was planned and is not in the figures.

    Attributes:
        kept_requests: of a cell that was cut short; they are on disk, and in no figure.
    """

    mode: str
    group: str
    cell: str
    repetition: int
    kept_requests: int = 0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a comparison, and where they come from.

    Attributes:
        schema: of this value; it rises when a field changes its meaning.
        emulated: whether the engines' time was modelled.
        is_complete: whether nothing is missing.
    """

    schema: int = SCHEMA
    emulated: bool
    is_complete: bool
    verdict: Verdict
    cells: list[CellSummary]
    ratios: list[Ratio]
    bends: list[Bend]
    targets: list[Target]
    missing: list[Missing]
    incidents: list[Incident]
    environment: dict[str, Any]


def load(folder: Folder, *, price_per_gpu_hour: float | None = None, gpus_per_engine: int | None = None) -> Comparison:
    """Make the figures from what is on disk.

    Args:
        price_per_gpu_hour, gpus_per_engine: in place of those that the comparison was begun with.

    Raises:
        FolderError: there is no comparison, or a file of it cannot be read.
    """
    manifest = folder.manifest()
    given = {"price_per_gpu_hour": price_per_gpu_hour, "gpus_per_engine": gpus_per_engine}
    changes = {name: value for name, value in given.items() if value is not None}
    manifest = msgspec.structs.replace(manifest, settings=msgspec.structs.replace(manifest.settings, **changes))
    return compute(manifest, folder.measured(), folder.incidents(), folder.cut_short())


def compute(
    manifest: Manifest, measured: Sequence[MeasuredCell], incidents: Sequence[Incident], cut_short: dict[str, int]
) -> Comparison:
    """The figures of `measured`. Pure.

    Args:
        cut_short: requests kept of each cell that does not count, by its key.
    """
    settings = manifest.settings
    by_place = pooled(measured)
    cells, ratios = [], []
    for group in groups(settings):
        for cell in group.cells:
            of_cell = {
                mode: repetitions
                for mode in group.modes
                if (repetitions := by_place.get((group.name, cell.name, mode))) is not None
            }
            everyone = [each for repetitions in of_cell.values() for each in repetitions]
            cells += [
                summarise_cell(
                    repetitions,
                    everyone,
                    price_per_gpu_hour=settings.price_per_gpu_hour,
                    gpus_per_engine=settings.gpus_per_engine,
                )
                for repetitions in of_cell.values()
            ]
            modes = list(of_cell)
            for position, mode in enumerate(modes):
                for baseline in modes[position + 1 :]:
                    ratios += ratios_of(of_cell[mode], of_cell[baseline])
    ratios += _over_the_load_alone(by_place)
    bends = bends_of(cells)
    missing = _missing(settings, measured, cut_short)
    return Comparison(
        emulated=settings.emulate,
        is_complete=not missing,
        verdict=verdict_of(cells, ratios, bends),
        cells=cells,
        ratios=ratios,
        bends=bends,
        targets=targets_of(cells, ratios),
        missing=missing,
        incidents=list(incidents),
        environment={
            "started": manifest.started,
            "machine": manifest.machine,
            "versions": manifest.versions,
            "settings": msgspec.to_builtins(settings),
        },
    )


def to_json(comparison: Comparison) -> bytes:
    """`summary.json`."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2) + b"\n"


def _over_the_load_alone(by_place: Mapping[tuple[str, str, str], Sequence[MeasuredCell]]) -> list[Ratio]:
    """TPOT of each divided mode over that of the same decode load without transfers, where both were measured."""
    alone = {
        (each[0].cell.rate, each[0].cell.prompt_tokens): each
        for (_, _, mode), each in by_place.items()
        if mode == Mode.DECODE_ONLY
    }
    found = []
    for (group, _, mode), each in by_place.items():
        reference = alone.get((each[0].cell.rate, each[0].cell.prompt_tokens))
        if group == "grid" and is_divided(mode) and reference is not None:
            found += ratios_of(each, reference, ("tpot_ms",))
    return found


def _missing(settings: CompareSettings, measured: Sequence[MeasuredCell], cut_short: dict[str, int]) -> list[Missing]:
    have = {(each.repetition, each.cell.group, each.mode, each.cell.name) for each in measured}
    return [
        Missing(
            mode=run.mode,
            group=run.group.name,
            cell=cell.name,
            repetition=run.repetition,
            kept_requests=cut_short.get(run.key(cell), 0),
        )
        for run in runs(settings)
        for cell in run.cells
        if (run.repetition, run.group.name, run.mode, cell.name) not in have
    ]
