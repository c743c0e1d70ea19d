"""What a long run has found, and the page about it. No I/O."""

from collections.abc import Sequence

import msgspec

from kvberth.drills.memory import MemoryTrend
from kvberth.drills.results import Report, table_of

__all__ = ["SoakReport", "soak_page"]

_MB = 1e6


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """The drills of a long run, and what became of the processes' memory.

    Attributes:
        rate: requests per second that were sent.
        leaving: share of the clients that went away, outside the drill of that.
        problems: of the run as a whole; those of a minute are in its row.
    """

    seconds: float
    rate: float
    capacity: float
    leaving: float
    drills: Report
    memory: list[MemoryTrend]
    problems: list[str]

    @property
    def has_passed(self) -> bool:
        """Whether no minute failed, and no memory grows."""
        return not self.problems and not self.drills.failed


def soak_page(report: SoakReport) -> str:
    """Markdown: what was done, each process's memory, a line per drill, and all that was wrong."""
    drills = report.drills
    lines = [
        f"{report.seconds / 60:.0f} minutes, {report.rate:.1f} requests per second "
        f"({report.rate / report.capacity:.0%} of what the machine can do), of which {report.leaving:.0%} were "
        f"cancelled by their clients; {drills.drills} faults, one after the other. Of {drills.requests} requests "
        f"{drills.right} were right, {drills.left} left, {drills.refused} refused, {drills.broken} broken, "
        f"{drills.wrong} wrong and {drills.hung} hung; {drills.leaked_blocks} blocks leaked, {drills.corruptions} "
        f"corruptions, {drills.failed} minutes failed.",
        "",
        "| process | minutes | samples | memory | slope per hour, 95% interval | of its thirds | grows |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_memory_row(each) for each in report.memory),
        "",
        table_of(drills.rows).rstrip(),
    ]
    if wrong := [*report.problems, *_problems(report)]:
        lines += ["", *(f"* {each}" for each in wrong)]
    return "\n".join(lines) + "\n"


def _memory_row(trend: MemoryTrend) -> str:
    slope = trend.slope
    low, high = slope.interval
    parts = ", ".join(f"{each.bytes_per_hour / _MB:+.1f}" for each in trend.parts) or "-"
    verdict = ("yes" if trend.is_growing else "no") if trend.is_judged else "not judged"
    return (
        f"| {trend.name} | {trend.hours * 60:.0f} | {slope.samples} | {trend.mean_bytes / _MB:.0f} MB "
        f"| {slope.bytes_per_hour / _MB:+.1f} MB ({low / _MB:+.1f} to {high / _MB:+.1f}) | {parts} | {verdict} |"
    )


def _problems(report: SoakReport) -> Sequence[str]:
    return [f"minute {row.round}, {row.drill}: {problem}" for row in report.drills.rows for problem in row.problems]
