"""Puts the report's page together: what each section shows is decided here, how it looks in the template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

import kvberth
from kvberth.compare.comparison import Comparison
from kvberth.compare.gaps import streams, windows
from kvberth.compare.modes import Mode, explain, say
from kvberth.compare.plan import load_of, prompts_of, tokens
from kvberth.compare.report import plots
from kvberth.compare.report.palette import Look, looks
from kvberth.compare.report.switching import before_you_switch
from kvberth.compare.store import MeasuredCell
from kvberth.compare.summary import CellSummary, Figures, Ratio
from kvberth.compare.texts import cell_title, is_doubtful, say_target
from kvberth.compare.verdict import Bend, known_percentile

__all__ = ["to_html"]

_STRIPS = (Mode.PUSH, Mode.PULL, Mode.VLLM_PULL, Mode.VLLM_PULL_INLINE, Mode.VLLM_PUSH, Mode.COLOCATED)
_MOST_STRIPS = 4
_DARKEST = 0.5
"""A ratio this far from 1, as a factor, has the heat map's full colour."""


def to_html(comparison: Comparison, measured: Sequence[MeasuredCell] = ()) -> str:
    """The page.

    Args:
        measured: the records, for the plot of single gaps.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvberth.compare.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "say": say,
        "explain": explain,
        "cell_title": cell_title,
        "doubtful": is_doubtful,
    }
    modes = list(dict.fromkeys(cell.mode for cell in comparison.cells))
    drawn = looks(modes)
    grid = [cell for cell in comparison.cells if cell.group == "grid"]
    return environment.get_template("page.html.j2").render(
        comparison=comparison,
        version=kvberth.__version__,
        modes=[mode for mode in modes if any(cell.mode == mode for cell in grid)],
        looks=drawn,
        heat_maps=_heat_maps(comparison, grid),
        curves=_curves(grid, comparison.bends, drawn),
        parts=list(plots.PARTS.values()),
        breakdowns=_breakdowns(grid),
        strips=_strips(grid, measured, drawn),
        heaviest=_extreme(grid, max),
        tables=_tables(comparison.cells),
        has_caches=any(cell.cached_share is not None for cell in comparison.cells),
        has_costs=any(cell.cost_per_request is not None for cell in grid),
        targets=[(*say_target(target), target.note, target.reason) for target in comparison.targets],
        before_you_switch=before_you_switch(comparison),
    )


def _extreme(grid: Sequence[CellSummary], pick: Any) -> str | None:
    """The name of the heaviest or the lightest cell."""
    chosen = pick(grid, key=lambda cell: load_of(cell.rate, cell.prompt_tokens), default=None)
    return chosen.cell if chosen is not None else None


def _heat_maps(comparison: Comparison, grid: Sequence[CellSummary]) -> list[dict[str, Any]]:
    """The first mode over each of the others: for each of these a map for TTFT and one for TPOT."""
    modes = list(dict.fromkeys(cell.mode for cell in grid))
    by_place = {(cell.mode, cell.prompt_tokens, cell.rate): cell for cell in grid}
    table = {
        (ratio.baseline, ratio.cell, ratio.metric): ratio
        for ratio in comparison.ratios
        if ratio.group == "grid" and ratio.mode == modes[0] and ratio.percentile == 50
    }

    def heat(baseline: str, prompt: int, rate: float, metric: str, digits: int) -> dict[str, Any] | None:
        own, other = (by_place.get((mode, prompt, rate)) for mode in (modes[0], baseline))
        return _heat(table.get((baseline, own.cell, metric)) if own else None, own, other, metric, digits)

    maps = []
    for baseline in modes[1:]:
        # Some modes are measured in some of the cells only.
        of_mode = [cell for cell in grid if cell.mode == baseline]
        rates = sorted({cell.rate for cell in of_mode})
        prompts = sorted({cell.prompt_tokens for cell in of_mode})
        maps.append(
            {
                "mode": modes[0],
                "baseline": baseline,
                "rates": rates,
                "maps": [
                    (
                        title,
                        [
                            (
                                tokens(prompt) if prompt else "trace",
                                [heat(baseline, prompt, rate, metric, digits) for rate in rates],
                            )
                            for prompt in prompts
                        ],
                    )
                    for metric, title, digits in (("ttft_ms", "TTFT p50", 0), ("tpot_ms", "TPOT p50", 1))
                ],
            }
        )
    return maps


def _heat(
    ratio: Ratio | None, own: CellSummary | None, other: CellSummary | None, metric: str, digits: int
) -> dict[str, Any] | None:
    """One field of a heat map; without colour where there is no difference."""
    if ratio is None or own is None or other is None:
        return None
    if own.has_lost_transfers or other.has_lost_transfers:
        return {"kind": "lost"}
    strength = 0.0
    if ratio.is_difference:
        strength = min(1.0, abs(1 - min(ratio.value, 1 / ratio.value)) / _DARKEST)
    ours, theirs = (getattr(getattr(cell, metric), "p50", None) for cell in (own, other))
    return {
        "value": ratio.value,
        "interval": f"{ratio.low:.2f} to {ratio.high:.2f}",
        "kind": "same" if not ratio.is_difference else "better" if ratio.value < 1 else "worse",
        "strength": round(strength * 100),
        "both": f"{_number(ours, digits)}/{_number(theirs, digits)}",
        "doubtful": is_doubtful(own) or is_doubtful(other),
    }


def _curves(grid: Sequence[CellSummary], bends: Sequence[Bend], drawn: Mapping[str, Look]) -> list[str]:
    """TTFT and TPOT over the rate, for each prompt length; nothing where there is one rate only."""
    if len({cell.rate for cell in grid}) < 2:
        return []
    found = []
    for metric in ("ttft_ms", "tpot_ms"):
        for prompt in sorted({cell.prompt_tokens for cell in grid}):
            cells = [cell for cell in grid if cell.prompt_tokens == prompt]
            percentile = known_percentile(cells) if metric == "ttft_ms" else "p50"
            curves: dict[str, list[tuple[float, float, float, float]]] = {}
            for cell in cells:
                figures: Figures | None = getattr(cell, metric)
                if figures is not None:
                    interval = getattr(figures, f"{percentile}_interval")
                    curves.setdefault(cell.mode, []).append((cell.rate, getattr(figures, percentile), *interval))
            if curves:
                of_length = [bend for bend in bends if bend.prompt_tokens == prompt] if metric == "ttft_ms" else []
                title = f"{metric.partition('_')[0].upper()} {percentile}, {prompts_of(prompt)}"
                found.append(plots.metric_by_rate(title, "ms", curves, drawn, of_length))
    return found


def _breakdowns(grid: Sequence[CellSummary]) -> list[str]:
    """Of the lightest and the heaviest cell."""
    names = dict.fromkeys(name for pick in (min, max) if (name := _extreme(grid, pick)) is not None)
    found = []
    for name in names:
        cells = [cell for cell in grid if cell.cell == name and cell.breakdown_ms is not None]
        if cells:
            found.append(plots.breakdown_bars(cell_title(cells[0]), cells))
    return found


def _strips(grid: Sequence[CellSummary], measured: Sequence[MeasuredCell], drawn: Mapping[str, Look]) -> list[str]:
    """Single gaps in the heaviest cell, of the modes that differ most in kind, on one scale."""
    name = _extreme(grid, max)
    of_cell = {cell.mode: cell for cell in grid if cell.cell == name and cell.stall is not None}
    chosen = [mode for mode in (*_STRIPS, *of_cell) if mode in of_cell]
    shown = list(dict.fromkeys(str(mode) for mode in chosen))[:_MOST_STRIPS]
    stalls = {mode: stall for mode in shown if (stall := of_cell[mode].stall) is not None}
    highest = max((stall.p99_ms for stall in stalls.values()), default=0.0) * 1.3
    found = []
    for mode, stall in stalls.items():
        first = next(
            (each for each in measured if (each.cell.group, each.cell.name, each.mode) == ("grid", name, mode)), None
        )
        if first is not None:
            transfers = windows(first.records, step_ms=stall.step_ms, transfer_ms=stall.transfer_ms)
            found.append(plots.gaps_over_time(say(mode), streams(first.records), transfers, drawn[mode], highest))
    return found


def _tables(cells: Iterable[CellSummary]) -> list[tuple[str, list[CellSummary]]]:
    """Every cell's modes, by title."""
    found: dict[str, list[CellSummary]] = {}
    for cell in cells:
        found.setdefault(cell_title(cell), []).append(cell)
    return list(found.items())


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
