"""Colours of the report's plots, which follow the page's light and dark theme.

matplotlib writes colours into the SVG as they are. So it draws with placeholders, which become CSS variables.
"""

import re
from collections.abc import Sequence

__all__ = ["BAND", "FAINT", "INK", "STYLES", "mode_colour", "part_colour", "themed"]

INK, FAINT, BAND = "#fe0001", "#fe0002", "#fe0003"
_NAMES = {INK: "ink", FAINT: "faint", BAND: "band"}
_MODES = 9
_PARTS = 5

STYLES = ("-", "-", "-", "--", "--", ":", ":", "-.", "-.")
"""By place of the mode, so that lines differ without colours too."""


def mode_colour(place: int) -> str:
    """The placeholder of the mode at this place."""
    return f"#fe01{place % _MODES:02x}"


def part_colour(place: int) -> str:
    """The placeholder of a part of a bar."""
    return f"#fe02{place % _PARTS:02x}"


def themed(svg: str) -> str:
    """Placeholders to CSS variables; the fixed size goes, so that the page sets it."""
    svg = svg[svg.index("<svg") :]
    names = dict(_NAMES)
    names |= {mode_colour(place): f"m{place}" for place in range(_MODES)}
    names |= {part_colour(place): f"p{place}" for place in range(_PARTS)}
    for colour, name in names.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def places(modes: Sequence[str]) -> dict[str, int]:
    """Each mode's place in the palette: the same in all plots of a report."""
    return {mode: place for place, mode in enumerate(modes)}
