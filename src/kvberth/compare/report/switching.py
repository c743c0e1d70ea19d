"""What a comparison has not tested, for somebody who is about to act on it. Pure."""

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
    share = settings["cancel_share"]
    cancelled = f"{share:.0%} of the requests cancelled" if share else "no cancellations"
    points += [
        f"One prompt length at a time, {settings['output_tokens']} output tokens, {settings['arrivals']} arrivals, "
        f"{cancelled}. Try your own traffic: kvberth bench, and kvberth compare --attach on what you run.",
        "One prefill and one decode worker, or two undivided engines: choosing between several decode workers is not "
        "in these figures, and it is where pull's late choice and push's early one differ.",
    ]
    if settings["repetitions"] < 3:
        points.append(
            f"{settings['repetitions']} repetition: the intervals hold what differs between requests, not what differs "
            "between starts of the engines. Three are the least for a decision."
        )
    points.append(
        "Failures of engines were not part of it. What kvberth does when a worker dies is in its documents and tests."
    )
    return points
