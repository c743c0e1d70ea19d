"""A comparison as Markdown, as CSV, and as tables for a terminal. Pure."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from kvberth.compare.comparison import Comparison
from kvberth.compare.modes import say
from kvberth.compare.plan import planned_seconds, prompts_of, runs
from kvberth.compare.settings import CompareSettings
from kvberth.compare.summary import CellSummary, Figures
from kvberth.compare.targets import Target

__all__ = ["cell_title", "is_doubtful", "plan_table", "say_plan", "say_target", "to_csv", "to_markdown", "to_tables"]

_HEADERS = (
    "mode",
    "TTFT p50 / p95 / p99, ms",
    "TPOT p50 / p95, ms",
    "handoff p50, ms",
    "post, ms",
    "descriptors",
    "failed",
    "wrong",
)


_SHORT_HEADERS = ("TTFT p50", "p95", "TPOT p50", "p95", "handoff", "failed", "wrong")


def to_markdown(comparison: Comparison) -> str:
    """The verdict, a table per cell, the targets, what is missing, machine, versions and settings."""
    lines = [f"# {comparison.verdict.headline}", ""]
    if comparison.emulated:
        lines += ["Figures of **emulated** engines.", ""]
    lines += [f"* {point}" for point in (*comparison.verdict.points, *comparison.verdict.doubts)]
    for title, cells in _by_cell(comparison):
        lines += ["", f"## {title}", "", _row(_HEADERS), _row(["---"] * len(_HEADERS))]
        lines += [_row(_fields(cell)) for cell in cells]
    lines += ["", "## Targets", "", _row(("id", "figure", "value", "target", "met")), _row(["---"] * 5)]
    lines += [_row(say_target(target)) for target in comparison.targets]
    if missed := [target for target in comparison.targets if target.reason]:
        lines += ["", "Missed:", ""]
        lines += [f"* {target.id}, {target.name}: {target.reason}" for target in missed]
    if comparison.missing:
        lines += ["", "## Missing", ""]
        lines += [
            f"* {say(each.mode)}, {each.group} {each.cell}, repetition {each.repetition + 1}"
            for each in comparison.missing
        ]
    return "\n".join((*lines, *_environment(comparison))) + "\n"


def _environment(comparison: Comparison) -> list[str]:
    lines = ["", "## Where the figures come from", "", f"* started: {comparison.environment['started']}"]
    parts = {name: comparison.environment[name] for name in ("machine", "versions", "settings")}
    lines += [f"* {name}: `{msgspec.json.encode(part).decode()}`" for name, part in parts.items()]
    return lines


def to_csv(comparison: Comparison) -> str:
    """A row per mode and cell. Figures within figures get names with a dot, such as `ttft_ms.p50`."""
    rows = [_flat(msgspec.to_builtins(cell)) for cell in comparison.cells]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_tables(comparison: Comparison) -> list[Table]:
    """For a terminal of 80 columns: one table per cell, and the targets that were measured."""
    found = []
    for title, cells in _by_cell(comparison):
        table = Table("mode", *(_SHORT_HEADERS), title=title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
            column.no_wrap = True
        for cell in cells:
            table.add_row(cell.mode + (" *" if is_doubtful(cell) else ""), *_short_fields(cell))
        found.append(table)
    measured = [target for target in comparison.targets if target.value is not None]
    if measured:
        targets = Table("id", "figure", "value", "target", "met", title="Targets", title_justify="left")
        for target in measured:
            targets.add_row(*say_target(target))
        found.append(targets)
    return found


def say_plan(settings: CompareSettings) -> str:
    """How long a comparison will take, in one line."""
    planned = runs(settings)
    seconds = sum(planned_seconds(settings, run, run.cells) for run in planned)
    clusters = "" if settings.attach else f" on {len(planned)} clusters, one at a time"
    return f"{sum(len(run.cells) for run in planned)} cells{clusters}, about {seconds / 60:.0f} min"


def plan_table(settings: CompareSettings) -> Table:
    """What will be measured, by group and mode, for a terminal."""
    table = Table("group", "mode", "cells", "requests", "min", title="Each repetition", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs(settings):
        if run.repetition == 0:
            sums = found.setdefault((run.group.name, run.mode), [0, 0, 0])
            sums[0] += len(run.cells)
            sums[1] += sum(cell.requests for cell in run.cells)
            sums[2] += planned_seconds(settings, run, run.cells) / 60
    for (group, mode), (cells, requests, minutes) in found.items():
        table.add_row(group, mode, f"{cells:.0f}", f"{requests:,.0f}", f"{minutes:.1f}")
    return table


def say_target(target: Target) -> tuple[str, str, str, str, str]:
    """Its id, name, value, limit, and whether it is met."""
    unit = f" {target.unit}" if target.unit else ""
    value = "not measured"
    if target.value is not None:
        value = f"{target.value:.2f}{unit}"
        if target.interval is not None:
            value += f" ({target.interval[0]:.2f} to {target.interval[1]:.2f})"
    met = {True: "yes", False: "no", None: ""}[target.met]
    return target.id, target.name, value, f"≤ {target.target:g}{unit}", met


def is_doubtful(cell: CellSummary) -> bool:
    """Whether its figures show the machine as well; such cells get an asterisk."""
    return bool(cell.warnings) or cell.has_lost_transfers


def cell_title(cell: CellSummary) -> str:
    """For people; the same for all modes."""
    title = f"{prompts_of(cell.prompt_tokens)} at {cell.rate:g} requests/s"
    if cell.group == "chunks-4096":
        title += ", prefill in chunks of 4,096"
    if cell.group == "prefix-caching":
        hit = f"{cell.prefix_hit:.0%} of the prompt in the caches" if cell.prefix_hit else "no prefix hit"
        title += f", {cell.memory} memory, {hit}"
    if cell.group == "decode-only":
        title += ", decode load alone"
    return title


def _by_cell(comparison: Comparison) -> list[tuple[str, list[CellSummary]]]:
    found: dict[str, list[CellSummary]] = {}
    for cell in comparison.cells:
        found.setdefault(cell_title(cell), []).append(cell)
    return list(found.items())


def _fields(cell: CellSummary) -> tuple[str, ...]:
    return (
        say(cell.mode) + (" *" if is_doubtful(cell) else ""),
        _figures(cell.ttft_ms, ("p50", "p95", "p99"), 0),
        _figures(cell.tpot_ms, ("p50", "p95"), 2),
        _figures(cell.handoff_ms, ("p50",), 1),
        _number(cell.post_ms, 1),
        _number(cell.descriptors_per_transfer, 0),
        f"{cell.failed} of {cell.requests}",
        "-" if cell.corruptions is None else f"{cell.corruptions}",
    )


def _short_fields(cell: CellSummary) -> tuple[str, ...]:
    return (
        _figures(cell.ttft_ms, ("p50",), 0),
        _figures(cell.ttft_ms, ("p95",), 0),
        _figures(cell.tpot_ms, ("p50",), 2),
        _figures(cell.tpot_ms, ("p95",), 2),
        _figures(cell.handoff_ms, ("p50",), 1),
        f"{cell.failed}",
        "-" if cell.corruptions is None else f"{cell.corruptions}",
    )


def _figures(figures: Figures | None, names: Sequence[str], digits: int) -> str:
    return "-" if figures is None else " / ".join(_number(getattr(figures, name), digits) for name in names)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _row(fields: Sequence[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, dict):
            found |= _flat(each, f"{prefix}{name}.")
        elif isinstance(each, list | tuple):
            found[f"{prefix}{name}"] = " ".join(f"{item}" for item in each)
        else:
            found[f"{prefix}{name}"] = each
    return found
