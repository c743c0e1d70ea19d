"""What the router's benchmark computes from its records. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["DIRECT", "added_rows", "cost_rows", "most_open", "window_figures"]

DIRECT = "direct"
_QUANTILES = (50, 95, 99)
_TIMES = ("ttft_ms", "itl_ms", "delay_ms")
_MIXES = 2  # of requests and tokens: with fewer, what costs cannot be told apart


def window_figures(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one window: times of the requests that count, as p50, p95 and p99 each, and what went through in all.

    `ttft_ms` is from the sending to the first token, `itl_ms` between two tokens, `delay_ms` from the engine's write of
    a token to its arrival.
    """
    ttft: list[float] = []
    itl: list[float] = []
    delay: list[float] = []
    requests = tokens = 0
    failures: dict[str, int] = {}
    for record in records:
        requests += 1
        tokens += len(record["arrivals_ms"])
        if record["error"] is not None:
            failures[record["error"]] = failures.get(record["error"], 0) + 1
        elif record["is_counted"]:
            ttft.append(record["arrivals_ms"][0])
            itl.extend(np.diff(record["arrivals_ms"]))
            delay.extend(record["delays_ms"])
    times = {
        name: {f"p{q}": float(value) for q, value in zip(_QUANTILES, np.percentile(values, _QUANTILES), strict=True)}
        for name, values in zip(_TIMES, (ttft, itl, delay), strict=True)
        if values
    }
    return {"requests": requests, "counted": len(ttft), "tokens": tokens, "failures": failures} | times


def added_rows(windows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each router adds to the same legs asked directly in the same repetition: for each time and quantile the
    median, least and most over the repetitions. Beside it the other figures' medians.
    """
    direct = {(each["mode"], each["case"], each["repetition"]): each for each in windows if each["target"] == DIRECT}
    rows = []
    for (target, mode, case), group in _grouped(windows, ("target", "mode", "case")).items():
        row: dict[str, Any] = {"target": target, "mode": mode, "case": case, "windows": len(group)}
        for name in ("requests", "tokens"):
            row[f"{name}_per_second"] = statistics.median(each[name] / each["wall_seconds"] for each in group)
        row["cores"] = statistics.median(each["router_cpu_seconds"] / each["wall_seconds"] for each in group)
        row["others_cores"] = statistics.median(each["others_cpu_seconds"] / each["wall_seconds"] for each in group)
        row["rss_bytes"] = statistics.median(each["router_rss_bytes"] for each in group)
        row["failed"] = sum(sum(each["failures"].values()) for each in group)
        for name in _TIMES:
            for quantile in (f"p{q}" for q in _QUANTILES):
                values = [each[name][quantile] for each in group if name in each]
                if target != DIRECT:
                    values = [
                        each[name][quantile] - direct[mode, case, each["repetition"]][name][quantile]
                        for each in group
                        if name in each
                    ]
                if values:
                    row[f"{name}_{quantile}"] = (statistics.median(values), min(values), max(values))
        rows.append(row)
    return rows


def cost_rows(windows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """CPU seconds of a router per request and per 1,000 tokens: the least squares over its windows, which mix the two
    differently. What it takes when idle is taken off first (`idle_cpu_share` of a window).
    """
    rows = []
    for (target, mode), group in _grouped(windows, ("target", "mode")).items():
        mixes = {each["case"] for each in group}
        if target == DIRECT or len(mixes) < _MIXES:
            continue
        counts = np.array([(each["requests"], each["tokens"] / 1e3) for each in group], dtype=float)
        spent = [each["router_cpu_seconds"] - each["idle_cpu_share"] * each["wall_seconds"] for each in group]
        (per_request, per_thousand), *_ = np.linalg.lstsq(counts, np.array(spent), rcond=None)
        rows.append(
            {
                "target": target,
                "mode": mode,
                "cpu_seconds_per_request": float(per_request),
                "cpu_seconds_per_1000_tokens": float(per_thousand),
            }
        )
    return rows


def most_open(records: Iterable[Mapping[str, Any]]) -> int:
    """How many streams had begun and not ended at the moment when they were the most."""
    changes = []
    for record in records:
        if record["arrivals_ms"]:
            first, last = (record["sent_s"] * 1e3 + record["arrivals_ms"][index] for index in (0, -1))
            changes += [(first, 1), (last, -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _grouped(
    records: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in records:
        groups.setdefault(tuple(each[name] for name in names), []).append(each)
    return groups
