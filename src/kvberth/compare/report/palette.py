"""Colours of the report's plots, which follow the page's light and dark theme.

matplotlib writes colours into the SVG as they are. So it draws with placeholders, which become CSS variables.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BAND", "FAINT", "INK", "Look", "looks", "part_colour", "themed"]

INK, FAINT, BAND = "#fe0001", "#fe0002", "#fe0003"
_NAMES = {INK: "ink", FAINT: "faint", BAND: "band"}
_MODES = 9
_PARTS = 5

_STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}
"""CSS's names of matplotlib's."""
_FIXED = {
    "push": (0, "solid"),
    "push-whole": (1, "solid"),
    "pull": (2, "solid"),
    "vllm-pull": (3, "dashed"),
    "vllm-pull-inline": (3, "dotted"),
    "vllm-push": (4, "dashed"),
    "vllm-push-inline": (4, "dotted"),
    "colocated": (5, "dashed"),
    "decode-only": (8, "dashed"),
}
"""Related modes have one colour; lines differ without colours too."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a mode is drawn. `place` is that of its colour, `line` what CSS calls the line's style."""

    place: int
    line: str

    @property
    def colour(self) -> str:
        """The placeholder."""
        return f"#fe01{self.place:02x}"

    @property
    def style(self) -> str:
        """What matplotlib calls the line's style."""
        return _STYLES[self.line]


def looks(modes: Sequence[str]) -> dict[str, Look]:
    """One for each mode; those that are not ours get what is left."""
    left = (Look(place, line) for line in _STYLES for place in (6, 7, 8, 5, 4, 3, 2, 1, 0))
    fixed = {mode: Look(*_FIXED[mode]) for mode in modes if mode in _FIXED}
    return {mode: fixed[mode] if mode in fixed else next(left) for mode in modes}


def part_colour(place: int) -> str:
    """The placeholder of a part of a bar."""
    return f"#fe02{place % _PARTS:02x}"


def themed(svg: str) -> str:
    """Placeholders to CSS variables; the fixed size goes, so that the page sets it."""
    svg = svg[svg.index("<svg") :]
    names = dict(_NAMES)
    names |= {Look(place, "solid").colour: f"m{place}" for place in range(_MODES)}
    names |= {part_colour(place): f"p{place}" for place in range(_PARTS)}
    for colour, name in names.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
