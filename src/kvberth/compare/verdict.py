"""What the figures mean, in words for somebody who has to decide. Pure.

A difference is one only if its interval excludes 1 and it is more than 3%; otherwise the words are "no difference".
"""

from collections.abc import Iterable, Sequence

import msgspec

from kvberth.bench.statistics import LEAST_IDLE_SHARE
from kvberth.compare.modes import say
from kvberth.compare.plan import tokens
from kvberth.compare.summary import CellSummary, Ratio

__all__ = ["Bend", "Verdict", "bends_of", "verdict_of"]

_BEND = 2.0
"""A mode's curve bends where the p95 of TTFT is so many times that of its lowest rate."""


class Bend(msgspec.Struct, frozen=True, kw_only=True):
    """Up to which rate a mode keeps its pace, for one prompt length.

    Attributes:
        rate: the lowest that was measured at which it does not; None if it does at all of them.
        last_good_rate: the highest below; None if the lowest is too much already.
        why: in words; empty without a bend.
    """

    mode: str
    prompt_tokens: int
    rate: float | None
    last_good_rate: float | None
    why: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that a reader sees.

    Attributes:
        headline: one sentence.
        points: what it stands on, one sentence each.
        doubts: what makes the figures doubtful, of this run.
    """

    headline: str
    points: list[str]
    doubts: list[str]


def bends_of(cells: Iterable[CellSummary]) -> list[Bend]:
    """For each mode and prompt length of the grid, in the order of the cells."""
    curves: dict[tuple[str, int], list[CellSummary]] = {}
    for cell in cells:
        if cell.group == "grid":
            curves.setdefault((cell.mode, cell.prompt_tokens), []).append(cell)
    return [
        _bend(mode, prompt_tokens, sorted(curve, key=lambda cell: cell.rate))
        for (mode, prompt_tokens), curve in curves.items()
    ]


def _bend(mode: str, prompt_tokens: int, curve: Sequence[CellSummary]) -> Bend:
    floor = curve[0].ttft_ms.p95 if curve[0].ttft_ms is not None else None
    last_good = None
    for cell in curve:
        why = ""
        if cell.failed:
            why = f"{cell.failed} of {cell.requests} requests failed"
        elif floor is not None and cell.ttft_ms is not None and cell.ttft_ms.p95 > _BEND * floor:
            why = f"the p95 of TTFT is {cell.ttft_ms.p95 / floor:.1f} times that at {curve[0].rate:g}/s"
        if why:
            return Bend(mode=mode, prompt_tokens=prompt_tokens, rate=cell.rate, last_good_rate=last_good, why=why)
        last_good = cell.rate
    return Bend(mode=mode, prompt_tokens=prompt_tokens, rate=None, last_good_rate=last_good)


def verdict_of(cells: Sequence[CellSummary], ratios: Sequence[Ratio], bends: Sequence[Bend]) -> Verdict:
    """The words for these figures."""
    grid = [cell for cell in cells if cell.group == "grid"]
    if not grid:
        return Verdict(headline="Nothing was measured to its end.", points=[], doubts=[])
    heavy = max(grid, key=lambda cell: (cell.rate * cell.prompt_tokens, cell.prompt_tokens)).cell
    light = min(grid, key=lambda cell: (cell.rate * cell.prompt_tokens, cell.prompt_tokens)).cell
    loads = {"At the lightest load": light, "At the heaviest load": heavy} if heavy != light else {"Here": heavy}
    points = [_compare_in(name, where, grid, ratios) for where, name in loads.items()]
    points += _bend_words(bends)
    points.append(_right_or_wrong(cells))
    return Verdict(
        headline=_headline(heavy, grid, ratios), points=[point for point in points if point], doubts=_doubts(cells)
    )


def _headline(heavy: str, grid: Sequence[CellSummary], ratios: Sequence[Ratio]) -> str:
    """Names a winner only where one differs from all others, at the heaviest load."""
    if wrong := sorted({say(cell.mode) for cell in grid if cell.corruptions}):
        return f"Do not use: {', '.join(wrong)}. Wrong KV was found; see below."
    best = _best(heavy, grid)
    if best is None:
        return "No mode answered at the heaviest load."
    if len({cell.mode for cell in grid}) == 1:
        return f"Only {say(best.mode)} was measured; there is nothing to compare it with."
    equals = [
        other.mode
        for other in _at(heavy, grid)
        if other.mode != best.mode and not _differs(best.mode, other.mode, heavy, ratios)
    ]
    place = f"{tokens(best.prompt_tokens)} prompts at {best.rate:g} requests/s"
    if len(equals) == len(_at(heavy, grid)) - 1:
        return f"No difference here: at {place} all modes give the first token equally soon."
    if equals:
        words = " and ".join([say(best.mode), *(say(mode) for mode in equals)])
        return f"At {place}, {words} give the first token soonest, without a difference between them."
    return f"This traffic wants {say(best.mode)}: at {place} it gives the first token soonest."


def _compare_in(name: str, where: str, grid: Sequence[CellSummary], ratios: Sequence[Ratio]) -> str:
    """The best mode of a cell against each of the others."""
    best = _best(name, grid)
    if best is None or best.ttft_ms is None or best.tpot_ms is None:
        return ""
    others = [cell for cell in _at(name, grid) if cell.mode != best.mode and cell.ttft_ms is not None]
    if not others:
        return ""
    place = f"{where} ({tokens(best.prompt_tokens)} prompts, {best.rate:g}/s)"
    apart = [cell for cell in others if _differs(best.mode, cell.mode, name, ratios)]
    if not apart:
        return f"{place} there is no difference: all modes give the first token in about {best.ttft_ms.p50:.0f} ms."
    slower = ", ".join(
        f"{say(cell.mode)} {cell.ttft_ms.p50:,.0f} ms" for cell in sorted(apart, key=_ttft) if cell.ttft_ms is not None
    )
    same = [say(cell.mode) for cell in others if cell not in apart]
    text = (
        f"{place} {say(best.mode)} gives the first token in {best.ttft_ms.p50:,.0f} ms (median) and a token every "
        f"{best.tpot_ms.p50:.1f} ms; later are {slower}"
    )
    return f"{text}; no difference to {', '.join(same)}." if same else f"{text}."


def _bend_words(bends: Sequence[Bend]) -> list[str]:
    """Who does not keep pace, and where."""
    words = [
        f"{say(bend.mode)} does not keep pace with {tokens(bend.prompt_tokens)} prompts at {bend.rate:g}/s: {bend.why}."
        for bend in bends
        if bend.rate is not None
    ]
    return words or ["All modes keep their pace at all rates that were measured: no curve bends."] if bends else []


def _right_or_wrong(cells: Sequence[CellSummary]) -> str:
    failed = sum(cell.failed for cell in cells)
    requests = sum(cell.requests for cell in cells)
    differing = sum(cell.answers_differing for cell in cells)
    known = [cell.corruptions for cell in cells if cell.corruptions is not None]
    words = [f"{failed} of {requests:,} requests failed" if failed else f"None of {requests:,} requests failed"]
    words.append(f"{differing} answers differ between modes" if differing else "all modes gave the same answers")
    if known:
        words.append(f"{sum(known)} KV contexts held wrong words" if sum(known) else "no KV word was wrong")
    return f"{'; '.join(words)}."


def _doubts(cells: Sequence[CellSummary]) -> list[str]:
    busy = [cell for cell in cells if cell.idle_share is not None and cell.idle_share < LEAST_IDLE_SHARE]
    if not busy:
        return []
    return [
        f"In {len(busy)} of {len(cells)} cells less than {LEAST_IDLE_SHARE:.0%} of the machine was idle: their figures "
        "show the machine as well. They are marked with an asterisk."
    ]


def _at(name: str, grid: Sequence[CellSummary]) -> list[CellSummary]:
    return [cell for cell in grid if cell.cell == name]


def _best(name: str, grid: Sequence[CellSummary]) -> CellSummary | None:
    """The soonest first token among the modes that failed nothing and were right."""
    sound = [cell for cell in _at(name, grid) if cell.ttft_ms is not None and not cell.failed and not cell.corruptions]
    return min(sound, key=_ttft, default=None)


def _ttft(cell: CellSummary) -> float:
    assert cell.ttft_ms is not None
    return cell.ttft_ms.p50


def _differs(mode: str, other: str, cell: str, ratios: Sequence[Ratio]) -> bool:
    """Whether the p50 of TTFT does; a pair that was not compared counts as no difference."""
    for ratio in ratios:
        is_cell = (ratio.group, ratio.cell, ratio.metric, ratio.percentile) == ("grid", cell, "ttft_ms", 50)
        if is_cell and {ratio.mode, ratio.baseline} == {mode, other}:
            return ratio.is_difference
    return False
