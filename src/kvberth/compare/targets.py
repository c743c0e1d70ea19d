"""The project's own targets for a comparison, computed from its cells. Pure.

A target that was not measured says so; one that was missed is reported as missed, with where the time went. A mode that
lost transfers in a cell was not measured there: to be faster than a handoff that does not work is nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvberth.bench.statistics import LEAST_IDLE_SHARE
from kvberth.compare.modes import Mode, say
from kvberth.compare.summary import CellSummary, Ratio

__all__ = ["Target", "targets_of"]

_LONG, _SHORT = 16384, 1024
_PULLS = (Mode.VLLM_PULL, Mode.VLLM_PULL_INLINE)
_PUSHES = (Mode.VLLM_PUSH, Mode.VLLM_PUSH_INLINE)
_INLINE = (Mode.VLLM_PULL_INLINE, Mode.VLLM_PULL)
_GRID, _CHUNKS = "grid", "chunks-4096"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One figure to reach.

    Attributes:
        id: that of the project's list; several lines may share one.
        name: what is measured.
        value: None if it was not measured.
        interval: 95%, of a ratio.
        target: the limit, of which a value may be no more.
        unit: of both; empty for a ratio.
        met: None if it was not measured.
        note: what a reader must know to judge it.
        reason: of one that was missed, what the figures say of why.
    """

    id: str
    name: str
    value: float | None
    interval: tuple[float, float] | None = None
    target: float
    unit: str = ""
    met: bool | None
    note: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a target is read: a cell, in words and by its names."""

    words: str
    group: str
    cell: str


_LIGHT = _Place("1k at 1/s", _GRID, f"{_SHORT}@1")
_ALONE = _Place("16k at 1/s", _GRID, f"{_LONG}@1")
_MIDDLE = _Place("16k at 4/s", _GRID, f"{_LONG}@4")
_HEAVY = _Place("16k at 8/s", _GRID, f"{_LONG}@8")
_CHUNKED = _Place("16k at 8/s, chunks of 4,096", _CHUNKS, f"{_LONG}@8")

_Figures = Mapping[tuple[str, str, str], CellSummary]
"""By group, cell and mode."""


def targets_of(cells: Sequence[CellSummary], ratios: Sequence[Ratio]) -> list[Target]:
    """All targets that a comparison can tell, met or not."""
    sound = {(each.group, each.cell, each.mode): each for each in cells if not each.has_lost_transfers}
    telling = _Telling(sound, ratios)
    push = Mode.PUSH
    return [
        *telling.ratios("T1", _MIDDLE, "ttft_ms", 50, push, _PULLS, 0.58),
        *telling.ratios("T1", _MIDDLE, "ttft_ms", 50, push, _PUSHES, 0.60),
        *telling.ratios("T2", _CHUNKED, "ttft_ms", 95, push, _PULLS, 0.60),
        *telling.ratios("T2", _CHUNKED, "ttft_ms", 95, push, _PUSHES, 0.50),
        *telling.ratios("T3", _HEAVY, "tpot_ms", 50, push, _INLINE, 0.55),
        *telling.ratios("T4", _HEAVY, "tpot_ms", 50, push, (Mode.DECODE_ONLY,), 1.02, note=_LOAD_ALONE),
        _to_first_token(sound),
        _stalls(sound),
        *telling.ratios("T10", _LIGHT, "ttft_ms", 50, push, _PULLS, 1.0),
        *telling.ratios("T11", _HEAVY, "ttft_ms", 50, Mode.PULL, _PULLS, 0.95),
        *telling.ratios("T11", _HEAVY, "tpot_ms", 50, Mode.PULL, _INLINE, 0.60),
    ]


_LOAD_ALONE = "the load without transfers: one engine that has each prompt but for its last block in its prefix cache"


class _Telling:
    """Ratios of two modes as targets."""

    def __init__(self, cells: _Figures, ratios: Sequence[Ratio]) -> None:
        self._cells = cells
        self._ratios = {
            (each.group, each.cell, each.mode, each.baseline, each.metric, each.percentile): each for each in ratios
        }

    def ratios(
        self,
        id_: str,
        place: _Place,
        metric: str,
        percentile: int,
        mode: Mode,
        baselines: Sequence[Mode],
        limit: float,
        note: str = "",
    ) -> list[Target]:
        """A line for each of the baselines that was measured, or one that says that none was."""
        title = f"{metric.partition('_')[0].upper()} p{percentile}, {place.words}: {say(mode)}"
        found, why_not = [], "not measured"
        for baseline in baselines:
            ratio = self._ratios.get((place.group, place.cell, mode, baseline, metric, percentile))
            own = self._cells.get((place.group, place.cell, mode))
            other = self._cells.get((place.group, place.cell, baseline))
            if own is not None and baseline == Mode.DECODE_ONLY:
                other = _load_alone(self._cells, own)  # in a group of its own
            if own is None or other is None:
                continue
            if ratio is None:
                why_not = f"too few requests for a p{percentile}" if percentile > 50 else why_not
                continue
            is_met = ratio.value <= limit
            found.append(
                Target(
                    id=id_,
                    name=f"{title} / {say(baseline)}",
                    value=ratio.value,
                    interval=(ratio.low, ratio.high),
                    target=limit,
                    met=is_met,
                    note=_join(filter(None, [note, *_busy(own, other)])),
                    reason="" if is_met else _where_it_went(metric, own, other),
                )
            )
        return found or [_not_measured(id_, f"{title} / {say(baselines[0])}", limit, note=why_not)]


def _load_alone(cells: _Figures, of: CellSummary) -> CellSummary | None:
    """The same decode load without transfers."""
    alone = (each for each in cells.values() if each.mode == Mode.DECODE_ONLY)
    return next((each for each in alone if (each.rate, each.prompt_tokens) == (of.rate, of.prompt_tokens)), None)


def _to_first_token(cells: _Figures) -> Target:
    name, limit = f"end of P's last forward pass to D's first token, {_ALONE.words}, p50", 15.0
    push = cells.get((_ALONE.group, _ALONE.cell, Mode.PUSH))
    if push is None or push.handoff_ms is None:
        return _not_measured("T5", name, limit, "ms")
    value, is_met, busy = push.handoff_ms.p50, push.handoff_ms.p50 <= limit, _busy(push)
    return Target(
        id="T5",
        name=name,
        value=value,
        interval=push.handoff_ms.p50_interval,
        target=limit,
        unit="ms",
        met=is_met,
        note=_join(["as the router hears of both: of the end from P's connector, of the token from D's stream", *busy]),
        reason="" if is_met else _where_it_went("ttft_ms", push),
    )


def _stalls(cells: _Figures) -> Target:
    name = f"longest gap between tokens beside somebody else's transfer beyond a decode step, {_HEAVY.words}, p99"
    push = cells.get((_HEAVY.group, _HEAVY.cell, Mode.PUSH))
    if push is None or push.stall is None:
        return _not_measured("T6", name, 1.0, "steps")
    stall, steps = push.stall, push.stall.p99_steps
    note = (
        f"a step is {stall.step_ms:.1f} ms; as a client sees the gaps beside {stall.transfers} transfers, so a busy "
        f"machine shows in them ({stall.p99_ms:.1f} ms)"
    )
    load = _load_alone(cells, push)
    if load is not None and load.stall is not None:
        steps = (stall.p99_ms - load.stall.p99_ms) / stall.step_ms
        note += f", less those of the load without transfers beside a request that comes ({load.stall.p99_ms:.1f} ms)"
    is_met = steps <= 1.0
    return Target(
        id="T6",
        name=name,
        value=steps,
        target=1.0,
        unit="steps",
        met=is_met,
        note=_join([note, *_busy(push)]),
        reason="" if is_met else _where_it_went("tpot_ms", push, load),
    )


def _where_it_went(metric: str, own: CellSummary, other: CellSummary | None = None) -> str:
    """What the figures of the cells say of their difference: no more than that."""
    both = [own] if other is None else [own, other]
    if metric == "ttft_ms":
        said = [_first_token(each) for each in both]
    else:
        said = [
            f"{say(each.mode)}: {each.tpot_ms.p50:.2f} ms; beside others' requests gaps are {each.stall.p50_ms:.1f} "
            f"ms (p50) and {each.stall.p99_ms:.1f} (p99){_late(each)}"
            for each in both
            if each.tpot_ms is not None and each.stall is not None
        ]
    return _join(filter(None, said)) or "the figures do not tell"


def _late(cell: CellSummary) -> str:
    share = cell.emulator_late_share
    return "" if share is None else f", and emulated steps were late by {share:.1%} for want of a processor"


def _first_token(cell: CellSummary) -> str:
    parts = cell.breakdown_ms
    if parts is None:
        return ""
    return (
        f"{say(cell.mode)}, means in ms: queue {parts.queue:.0f}, prefill {parts.prefill:.0f}, transfer behind it "
        f"{parts.transfer:.0f}, first step {parts.first_step:.0f}, rest {parts.rest:.0f}"
    )


def _busy(*cells: CellSummary | None) -> list[str]:
    """That the machine had too little to spare, of a target that is met as of one that is missed."""
    shares = [(each.idle_share, each.mode) for each in cells if each is not None and each.idle_share is not None]
    return [
        f"doubtful, since only {share:.0%} of the machine was idle with {say(mode)}"
        for share, mode in shares
        if share < LEAST_IDLE_SHARE
    ]


def _join(said: Iterable[str]) -> str:
    return "; ".join(said)


def _not_measured(id_: str, name: str, limit: float, unit: str = "", note: str = "not measured") -> Target:
    return Target(id=id_, name=name, value=None, target=limit, unit=unit, met=None, note=note)
