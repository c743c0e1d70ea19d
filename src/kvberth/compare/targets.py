"""The project's own targets for a comparison, computed from its cells. Pure.

A target that was not measured says so; one that was missed is reported as missed. A mode that lost transfers in a cell
was not measured there: to be faster than a handoff that does not work is nothing.
"""

from collections.abc import Mapping, Sequence

import msgspec

from kvberth.compare.modes import Mode, say
from kvberth.compare.summary import CellSummary, Ratio

__all__ = ["Target", "targets_of"]

_LONG, _SHORT = 16384, 1024
_PULLS = (Mode.VLLM_PULL, Mode.VLLM_PULL_INLINE)
_VLLM = {
    Mode.VLLM_PULL: _PULLS,
    Mode.VLLM_PUSH: (Mode.VLLM_PUSH, Mode.VLLM_PUSH_INLINE),
}
_INLINE = (Mode.VLLM_PULL_INLINE, Mode.VLLM_PULL)


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
    """

    id: str
    name: str
    value: float | None
    interval: tuple[float, float] | None = None
    target: float
    unit: str = ""
    met: bool | None
    note: str = ""


Ratios = Mapping[tuple[str, str, str, str, str, int], Ratio]
"""By group, cell, mode, baseline, metric and percentile."""


def targets_of(cells: Sequence[CellSummary], ratios: Sequence[Ratio]) -> list[Target]:
    """All targets that a comparison can tell, met or not."""
    broken = {(each.group, each.cell, each.mode) for each in cells if each.has_lost_transfers}
    table = {
        (each.group, each.cell, each.mode, each.baseline, each.metric, each.percentile): each
        for each in ratios
        if not broken & {(each.group, each.cell, each.mode), (each.group, each.cell, each.baseline)}
    }
    return [
        *_against_vllm("T1", "TTFT p50, 16k at 4/s", table, ("grid", f"{_LONG}@4"), "ttft_ms", 50, (0.58, 0.60)),
        *_against_vllm(
            "T2",
            "TTFT p95, 16k at 8/s, chunks of 4,096",
            table,
            ("chunks-4096", f"{_LONG}@8"),
            "ttft_ms",
            95,
            (0.60, 0.50),
        ),
        *_ratios("T3", "TPOT p50, 16k at 8/s", table, ("grid", f"{_LONG}@8"), "tpot_ms", 50, Mode.PUSH, _INLINE, 0.55),
        _undisturbed(cells),
        _to_first_token(cells),
        _stalls(cells),
        *_ratios("T10", "TTFT p50, 1k at 1/s", table, ("grid", f"{_SHORT}@1"), "ttft_ms", 50, Mode.PUSH, _PULLS, 1.0),
        *_ratios("T11", "TTFT p50, 16k at 8/s", table, ("grid", f"{_LONG}@8"), "ttft_ms", 50, Mode.PULL, _PULLS, 0.95),
        *_ratios("T11", "TPOT p50, 16k at 8/s", table, ("grid", f"{_LONG}@8"), "tpot_ms", 50, Mode.PULL, _INLINE, 0.60),
    ]


def _against_vllm(
    id_: str,
    name: str,
    table: Ratios,
    place: tuple[str, str],
    metric: str,
    percentile: int,
    limits: tuple[float, float],
) -> list[Target]:
    """Push over vLLM's pull and over vLLM's push, each with both ways of posting."""
    found = []
    for baselines, limit in zip(_VLLM.values(), limits, strict=True):
        found += _ratios(id_, name, table, place, metric, percentile, Mode.PUSH, baselines, limit)
    return found


def _ratios(
    id_: str,
    name: str,
    table: Ratios,
    place: tuple[str, str],
    metric: str,
    percentile: int,
    mode: Mode,
    baselines: Sequence[Mode],
    limit: float,
) -> list[Target]:
    """A line for each of the baselines that was measured, or one that says that none was."""
    found = []
    for baseline in baselines:
        ratio = table.get((*place, mode, baseline, metric, percentile))
        if ratio is not None:
            found.append(
                Target(
                    id=id_,
                    name=f"{name}: {say(mode)} / {say(baseline)}",
                    value=ratio.value,
                    interval=(ratio.low, ratio.high),
                    target=limit,
                    met=ratio.value <= limit,
                )
            )
    return found or [_not_measured(id_, f"{name}: {say(mode)} / {say(baselines[0])}", limit)]


def _undisturbed(cells: Sequence[CellSummary]) -> Target:
    name, limit = "TPOT p50, 16k at 8/s: kvberth push / the same decode load without transfers", 1.02
    push = _cell(cells, "grid", f"{_LONG}@8", Mode.PUSH)
    alone = _cell(cells, "decode-only", f"{_LONG}@8-hit", Mode.DECODE_ONLY)
    if push is None or alone is None or push.tpot_ms is None or alone.tpot_ms is None:
        return _not_measured("T4", name, limit)
    value = push.tpot_ms.p50 / alone.tpot_ms.p50
    return Target(
        id="T4",
        name=name,
        value=value,
        target=limit,
        met=value <= limit,
        note="the load without transfers: one engine that has each prompt but for its last block in its prefix cache",
    )


def _to_first_token(cells: Sequence[CellSummary]) -> Target:
    name, limit = "the prefill worker's answer to the decode worker's first token, 16k at 1/s, p50", 15.0
    push = _cell(cells, "grid", f"{_LONG}@1", Mode.PUSH)
    if push is None or push.handoff_ms is None:
        return _not_measured("T5", name, limit, "ms")
    return Target(
        id="T5",
        name=name,
        value=push.handoff_ms.p50,
        interval=push.handoff_ms.p50_interval,
        target=limit,
        unit="ms",
        met=push.handoff_ms.p50 <= limit,
        note="as the router sees both; the prefill worker's answer leaves it some ms after its last forward pass",
    )


def _stalls(cells: Sequence[CellSummary]) -> Target:
    name = "longest gap between tokens beside somebody else's transfer beyond a decode step, 16k at 8/s, p99"
    push = _cell(cells, "grid", f"{_LONG}@8", Mode.PUSH)
    if push is None or push.stall is None:
        return _not_measured("T6", name, 1.0, "steps")
    return Target(
        id="T6",
        name=name,
        value=push.stall.p99_steps,
        target=1.0,
        unit="steps",
        met=push.stall.p99_steps <= 1.0,
        note=f"a step is {push.stall.step_ms:.1f} ms; as a client sees the gaps, so a busy machine shows in them",
    )


def _not_measured(id_: str, name: str, limit: float, unit: str = "") -> Target:
    return Target(id=id_, name=name, value=None, target=limit, unit=unit, met=None, note="not measured")


def _cell(cells: Sequence[CellSummary], group: str, cell: str, mode: Mode) -> CellSummary | None:
    return next((each for each in cells if (each.group, each.cell, each.mode) == (group, cell, mode)), None)
