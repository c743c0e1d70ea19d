"""The report's plots, as SVG for the page: matplotlib draws small ones offline, and its text stays text.

plotly and Vega would bring an interactive library of 1 to 4 MB into each report; these plots are 10 to 40 kB.
"""

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvberth.compare.gaps import Stream, Window
from kvberth.compare.modes import say
from kvberth.compare.report.palette import BAND, FAINT, INK, Look, part_colour, themed
from kvberth.compare.summary import CellSummary
from kvberth.compare.verdict import Bend

__all__ = ["PARTS", "breakdown_bars", "gaps_over_time", "metric_by_rate"]

PARTS = {
    "queue": "queue",
    "prefill": "prefill",
    "rest": "setup, front ends, waits",
    "transfer": "transfer after prefill",
    "first_step": "first decode step",
}
_WINDOW_MS = 1500.0
_LEAST_GAP_MS = 0.5
"""Below, chunks that came together."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvberth",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def metric_by_rate(
    title: str,
    unit: str,
    curves: Mapping[str, Sequence[tuple[float, float, float, float]]],
    looks: Mapping[str, Look],
    bends: Sequence[Bend] = (),
) -> str:
    """One line per mode over the rate, with its intervals and its bend.

    Args:
        curves: by mode, points of (rate, value, low, high).
        bends: of the same prompt length.
    """
    with _figure(4.2, 3.0) as (figure, axes):
        for mode, points in curves.items():
            rates, values, lows, highs = np.array(points).T
            colour = looks[mode].colour
            axes.fill_between(rates, lows, highs, color=colour, alpha=0.15, linewidth=0)
            axes.plot(rates, values, looks[mode].style, color=colour, marker="o", markersize=3.5, linewidth=1.8)
            at = next((bend.rate for bend in bends if bend.mode == mode), None)
            if at is not None and at in rates:
                bent = values[list(rates).index(at)]
                axes.plot([at], [bent], "o", markersize=11, fillstyle="none", color=colour, markeredgewidth=1.6)
        every = sorted({point[0] for points in curves.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [f"{rate:g}" for rate in every])
        axes.xaxis.set_minor_formatter(NullFormatter())
        _log_scale_if_wide(axes, [point[1] for points in curves.values() for point in points])
        axes.set(xlabel="requests/s", ylabel=unit)
        axes.set_title(title)
        return _svg(figure)


def breakdown_bars(title: str, cells: Sequence[CellSummary]) -> str:
    """One bar per mode: where the mean time to first token went."""
    shown = [(cell, cell.breakdown_ms) for cell in cells if cell.breakdown_ms is not None]
    with _figure(5.0, 0.9 + 0.36 * len(shown)) as (figure, axes):
        for row, (_, breakdown) in enumerate(shown):
            start = 0.0
            for place, part in enumerate(PARTS):
                width = getattr(breakdown, part)
                axes.barh(row, width, left=start, color=part_colour(place), height=0.62)
                start += width
            axes.text(start, row, f" {start:,.0f} ms", va="center", ha="left")
        axes.set_yticks(range(len(shown)), [say(cell.mode) for cell, _ in shown])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.18)
        axes.set(xlabel="ms")
        axes.set_title(title)
        return _svg(figure)


def gaps_over_time(
    title: str, streams: Sequence[Stream], transfers: Sequence[Window], look: Look, highest_ms: float
) -> str:
    """Each gap between two tokens as a bar as long as the gap and as high, over a part of the measurement.

    Bands are the transfers of other requests: the client sees when they end, and their mean length is drawn.
    """
    ends = [window.end_ms for window in transfers]
    start = float(np.median(ends)) - _WINDOW_MS / 2 if ends else 0.0
    segments = [
        ((earlier - start, later - earlier), (later - start, later - earlier))
        for stream in streams
        for earlier, later in itertools.pairwise(stream.times_ms)
        if later - earlier >= _LEAST_GAP_MS and later > start and earlier < start + _WINDOW_MS
    ]
    with _figure(4.2, 2.4) as (figure, axes):
        for window in transfers:
            if window.end_ms > start and window.start_ms < start + _WINDOW_MS:
                axes.axvspan(window.start_ms - start, window.end_ms - start, color=BAND, linewidth=0)
        vertices = np.array(segments).reshape(-1, 2) if segments else np.zeros((0, 2))
        codes = [Path.MOVETO, Path.LINETO] * len(segments)
        if segments:
            path = PathPatch(Path(vertices, codes), edgecolor=look.colour, facecolor="none", linewidth=1.6)
            axes.add_patch(path)
        axes.set(xlim=(0, _WINDOW_MS), ylim=(2, max(20.0, highest_ms)), xlabel="ms", ylabel="gap, ms")
        axes.set_yscale("log")
        _plain_numbers(axes)
        axes.set_title(title)
        return _svg(figure)


def _log_scale_if_wide(axes: Axes, values: Sequence[float]) -> None:
    if max(values) > 4 * min(values) > 0:
        axes.set_yscale("log")
        _plain_numbers(axes)
    else:
        axes.set_ylim(bottom=0)


def _plain_numbers(axes: Axes) -> None:
    """1,000 and not 10^3."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """In inches. Without pyplot, which would keep state and look for a screen."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return themed(text.getvalue())
