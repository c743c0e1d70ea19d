"""What a comparison has not tested, for somebody who is about to act on it. Pure."""

from typing import Any

from kvberth.compare.comparison import Comparison
from kvberth.compare.modes import EMULATED_ONLY

__all__ = ["before_you_switch"]


def before_you_switch(comparison: Comparison) -> list[str]:
    """One sentence each, those that weigh most first."""
    settings = comparison.environment["settings"]
    modes = {cell.mode for cell in comparison.cells}
    points = []
    if comparison.emulated:
        points.append(
            f"The engines were emulated ({settings['model']}): scheduler, connectors, router and NIXL are real, the "
            "time of each step is modelled. Nothing is said about kernels, GPU memory or the quality of answers."
        )
        points.append(
            "The wire was modelled by bandwidth and latency; contention in a real network was not."
            if settings["emulate_link"]
            else "The KV cache went through shared memory: the time on a wire and RDMA hardware are not in the figures."
        )
        points.append(
            "Descriptors, their number and their posting are real; the pages behind them are small, so a transfer's "
            "bytes are not those of the real model."
        )
    if not settings["attach"]:
        points.append(
            "All engines and the load generator shared one machine. Where the machine was busy, cells have an asterisk."
        )
    if modes & EMULATED_ONLY and comparison.emulated:
        points.append(
            "NIXL's progress thread rests 1 ms between rounds in vLLM's modes too. With its default each agent burns a "
            "core even when idle, and without cores to spare vLLM's modes would look worse than they are."
        )
    points += [
        f"{_traffic(settings)} Try your own: --trace FILE, and --attach on what you run.",
        "One prefill and one decode worker, or two undivided engines: choosing between several decode workers is not "
        "in these figures, and it is where pull's late choice and push's early one differ.",
    ]
    if settings["attach"] and (settings["trace"] or settings["prefix_share"]):
        points.append(
            "Running deployments keep their prefix caches from one cell and repetition to the next, and may have found "
            "there what an earlier one left."
        )
    if settings["repetitions"] < 3:
        points.append(
            f"{settings['repetitions']} repetition: the intervals hold what differs between requests, not what differs "
            "between starts of the engines. Three are the least for a decision."
        )
    points.append(
        "Failures of engines were not part of it. What kvberth does when a worker dies is in its documents and tests."
    )
    return points


def _traffic(settings: dict[str, Any]) -> str:
    """What was sent, in one sentence."""
    answers = f"{settings['output_tokens']} output tokens" if settings["output_tokens"] else "its own answers' lengths"
    arrivals = "its own times" if settings["arrivals"] == "trace" else f"{settings['arrivals']} arrivals"
    words = [answers, arrivals]
    if share := settings["prefix_share"]:
        words.append(f"{share:.0%} of each prompt shared")
    if settings["turns"] > 1:
        words.append(f"conversations of up to {settings['turns']} turns")
    share = settings["cancel_share"]
    words.append(f"{share:.0%} of the requests cancelled" if share else "no cancellations")
    trace = settings["trace"]
    what = f"The first {trace['requests']} requests of a trace" if trace else "One prompt length at a time"
    return f"{what}, {', '.join(words)}."
