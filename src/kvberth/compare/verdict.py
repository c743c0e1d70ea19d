"""What the figures mean, in words for somebody who has to decide. Pure.

A difference is one only if its interval excludes 1 and it is more than 3%; otherwise the words are "no difference".
The decode load alone is a reference and no way to serve: no words are about it.
"""

from collections.abc import Iterable, Sequence

import msgspec

from kvberth.bench.statistics import LEAST_IDLE_SHARE
from kvberth.compare.modes import say
from kvberth.compare.plan import load_of, prompts_of
from kvberth.compare.summary import CellSummary, Figures, Ratio

__all__ = ["Bend", "Verdict", "bends_of", "known_percentile", "verdict_of"]

_BEND = 2.0
"""A mode's curve bends where TTFT is so many times that of its lowest rate: its p95, or its p50 if that is all."""


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
    name = known_percentile(curve)
    floor = getattr(curve[0].ttft_ms, name, None)
    last_good = None
    for cell in curve:
        why = ""
        value = getattr(cell.ttft_ms, name, None)
        if cell.failed:
            why = f"{cell.failed} of {cell.requests} requests failed"
        elif floor is not None and value is not None and value > _BEND * floor:
            why = f"the {name} of TTFT is {value / floor:.1f} times that at {curve[0].rate:g}/s"
        if why:
            return Bend(mode=mode, prompt_tokens=prompt_tokens, rate=cell.rate, last_good_rate=last_good, why=why)
        last_good = cell.rate
    return Bend(mode=mode, prompt_tokens=prompt_tokens, rate=None, last_good_rate=last_good)


def known_percentile(cells: Iterable[CellSummary]) -> str:
    """`p95` of TTFT if all of these have it, or else `p50`."""
    return "p95" if all(cell.ttft_ms is None or cell.ttft_ms.p95 is not None for cell in cells) else "p50"


def verdict_of(cells: Sequence[CellSummary], ratios: Sequence[Ratio], bends: Sequence[Bend]) -> Verdict:
    """The words for these figures."""
    grid = [cell for cell in cells if cell.group == "grid"]
    if not grid:
        return Verdict(headline="Nothing was measured to its end.", points=[], doubts=[])
    heavy = max(grid, key=lambda cell: load_of(cell.rate, cell.prompt_tokens)).cell
    light = min(grid, key=lambda cell: load_of(cell.rate, cell.prompt_tokens)).cell
    loads = {"At the lightest load": light, "At the heaviest load": heavy} if heavy != light else {"Here": heavy}
    points = [_compare_in(name, where, grid, ratios) for where, name in loads.items()]
    points += _bend_words(bends)
    points.append(_right_or_wrong(cells))
    return Verdict(
        headline=_headline(heavy, grid, ratios), points=[point for point in points if point], doubts=_doubts(cells)
    )


def _headline(heavy: str, grid: Sequence[CellSummary], ratios: Sequence[Ratio]) -> str:
    """At the heaviest load: a mode is named only if no other is better in first tokens or in the ones behind."""
    if wrong := sorted({say(cell.mode) for cell in grid if cell.corruptions}):
        return f"Do not use: {', '.join(wrong)}. Wrong KV was found; see below."
    best = _best(heavy, grid)
    if best is None:
        return "No mode answered at the heaviest load."
    cells = [cell for cell in _at(heavy, grid) if not cell.has_lost_transfers]
    everyone = [cell.mode for cell in cells]
    place = f"{prompts_of(best.prompt_tokens)} at {best.rate:g} requests/s"
    if len(everyone) == 1:
        return f"Only {say(best.mode)} was measured; there is nothing to compare it with."
    words = _winner(place, len(everyone), *(_leaders(heavy, metric, grid, ratios) for metric in ("ttft_ms", "tpot_ms")))
    return f"{words} But the machine was busy, and this may be its doing." if any(map(_is_busy, cells)) else words


def _winner(place: str, num_modes: int, soonest: Sequence[str], steadiest: Sequence[str]) -> str:
    """The sentence for those that lead in first tokens, and in the tokens behind."""
    both = [mode for mode in soonest if mode in steadiest]
    if len(both) == num_modes:
        return (
            f"No difference here: at {place} all modes give first tokens equally soon, and those behind them as fast."
        )
    if both:
        wants = f"This traffic wants {say(both[0])}" if len(both) == 1 else f"Take {_list(both, 'or')}"
        return f"{wants}: at {place} no mode gives a first token sooner, or the tokens behind it faster."
    return (
        f"It depends on what you want: at {place} the first token comes soonest from {_list(soonest, 'and')}, the "
        f"tokens behind it fastest from {_list(steadiest, 'and')}."
    )


def _leaders(name: str, metric: str, grid: Sequence[CellSummary], ratios: Sequence[Ratio]) -> list[str]:
    """The best mode of a cell by the p50 of `metric`, and those that do not differ from it."""
    sound = _sound(name, grid)
    best = min(sound, key=lambda cell: _p50(cell, metric))
    return [cell.mode for cell in sound if cell is best or not _differs(best.mode, cell.mode, name, ratios, metric)]


def _list(modes: Sequence[str], word: str) -> str:
    words = [say(mode) for mode in modes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {word} {words[-1]}"


def _compare_in(name: str, where: str, grid: Sequence[CellSummary], ratios: Sequence[Ratio]) -> str:
    """The best mode of a cell against each of the others."""
    best = _best(name, grid)
    if best is None or best.ttft_ms is None or best.tpot_ms is None:
        return ""
    others = [
        cell
        for cell in _at(name, grid)
        if cell.mode != best.mode and cell.ttft_ms and cell.tpot_ms and not cell.has_lost_transfers
    ]
    if not others:
        return ""
    place = f"{where} ({prompts_of(best.prompt_tokens)}, {best.rate:g}/s)"
    apart = [cell for cell in others if _differs(best.mode, cell.mode, name, ratios)]
    if not apart:
        words = f"{place} first tokens come equally soon in all modes, in about {best.ttft_ms.p50:,.0f} ms"
    else:
        later = ", ".join(f"{say(cell.mode)} {_ttft(cell):,.0f}" for cell in sorted(apart, key=_ttft))
        same = [say(cell.mode) for cell in others if cell not in apart]
        words = f"{place} first tokens come soonest from {say(best.mode)}, in {best.ttft_ms.p50:,.0f} ms (median)"
        words += f", with no difference to {', '.join(same)}" if same else ""
        words += f"; later come {later}"
    rates = [_p50(cell, "tpot_ms") for cell in (best, *others)]
    low, high = min(rates), max(rates)
    if high < low * 1.03:
        return f"{words}. The tokens behind them come every {low:.1f} ms in all modes."
    slowest = max((best, *others), key=lambda cell: _p50(cell, "tpot_ms"))
    return f"{words}. The tokens behind them come every {low:.1f} to {high:.1f} ms ({say(slowest.mode)})."


def _bend_words(bends: Sequence[Bend]) -> list[str]:
    """Who does not keep pace, and where: a sentence per prompt length."""
    if not bends:
        return []
    found: dict[int, list[str]] = {}
    for bend in bends:
        if bend.rate is not None:
            found.setdefault(bend.prompt_tokens, []).append(f"{say(bend.mode)} from {bend.rate:g}/s on ({bend.why})")
    words = [f"With {prompts_of(count)} these do not keep pace: {', '.join(modes)}." for count, modes in found.items()]
    return words or ["All modes keep their pace at all rates that were measured: no curve bends."]


def _right_or_wrong(cells: Sequence[CellSummary]) -> str:
    failed = sum(cell.failed for cell in cells)
    requests = sum(cell.requests for cell in cells)
    differing = sum(cell.answers_differing for cell in cells)
    known = [cell.corruptions for cell in cells if cell.corruptions is not None]
    words = [f"{failed} of {requests:,} requests failed" if failed else f"None of {requests:,} requests failed"]
    if cancelled := sum(cell.cancelled for cell in cells):
        words.append(f"{cancelled} were cancelled by their clients, as planned")
    words.append(f"{differing} answers differ between modes" if differing else "all modes gave the same answers")
    if known:
        words.append(f"{sum(known)} KV contexts held wrong words" if sum(known) else "no KV word was wrong")
    return f"{'; '.join(words)}."


def _doubts(cells: Sequence[CellSummary]) -> list[str]:
    doubts = []
    lost = [cell for cell in cells if cell.has_lost_transfers]
    if lost:
        count = sum(cell.requests - cell.failed - cell.cancelled - (cell.transfers or 0) for cell in lost)
        doubts.append(
            f"{_list(list(dict.fromkeys(cell.mode for cell in lost)), 'and')}: {count} requests were answered without "
            "their transfer, since it failed and the decode worker computed the prompt itself. The figures of these "
            "cells are not those of a handoff that works; look into the engines' logs."
        )
    busy = [cell for cell in cells if _is_busy(cell)]
    if busy:
        doubts.append(
            f"In {len(busy)} of {len(cells)} cells less than {LEAST_IDLE_SHARE:.0%} of the machine was idle: their "
            "figures show the machine as well. They are marked with an asterisk."
        )
    return doubts


def _is_busy(cell: CellSummary) -> bool:
    """Its figures show the machine as well."""
    return cell.idle_share is not None and cell.idle_share < LEAST_IDLE_SHARE


def _at(name: str, grid: Sequence[CellSummary]) -> list[CellSummary]:
    return [cell for cell in grid if cell.cell == name]


def _sound(name: str, grid: Sequence[CellSummary]) -> list[CellSummary]:
    """The modes that failed nothing, were right, and did hand over: only these can be recommended."""
    return [
        cell
        for cell in _at(name, grid)
        if cell.ttft_ms is not None
        and cell.tpot_ms is not None
        and not (cell.failed or cell.corruptions or cell.has_lost_transfers)
    ]


def _best(name: str, grid: Sequence[CellSummary]) -> CellSummary | None:
    """The soonest first token among them."""
    return min(_sound(name, grid), key=_ttft, default=None)


def _ttft(cell: CellSummary) -> float:
    return _p50(cell, "ttft_ms")


def _p50(cell: CellSummary, metric: str) -> float:
    figures = getattr(cell, metric)
    assert isinstance(figures, Figures)
    return figures.p50


def _differs(mode: str, other: str, cell: str, ratios: Sequence[Ratio], metric: str = "ttft_ms") -> bool:
    """Whether the p50 of `metric` does; a pair that was not compared counts as no difference."""
    for ratio in ratios:
        is_cell = (ratio.group, ratio.cell, ratio.metric, ratio.percentile) == ("grid", cell, metric, 50)
        if is_cell and {ratio.mode, ratio.baseline} == {mode, other}:
            return ratio.is_difference
    return False
