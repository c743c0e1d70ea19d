"""`kvberth faults`: a local cluster is broken on purpose, in many ways, and every request accounted for."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvberth.cli.errors import BadSettings, RunFailed

if TYPE_CHECKING:
    from kvberth.drills import Drill, DrillRow, Report, SoakReport

__all__ = ["faults"]


def faults(
    quick: Annotated[bool, typer.Option("--quick", help="A few drills, in under four minutes.")] = False,
    drill: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one. Repeatable. --list names them.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; each has other moments and victims.")] = 1,
    soak: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=60, help="For so long: a fault a minute under a heavier load, and a look at memory."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same traffic, moments and victims.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures and a row per drill there.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the run that wrote the --json FILE was stopped.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="Begin no drill after so many; --resume goes on from there.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a table there.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for logs; a temporary one if not given.")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Name the drills, and do nothing.")] = False,
) -> None:
    """Break a local cluster of emulated engines on purpose, under load, and judge what becomes of each request.

    Two prefill workers, two decode workers and the router. Network drills need root, for namespaces; others do not.
    Exit status: 0 when all drills passed, 1 when one failed, 2 for a bad argument.
    """
    from kvberth.drills import DRILLS  # noqa: PLC0415
    from kvberth.launch import LaunchError  # noqa: PLC0415

    if list_them:
        for each in DRILLS:
            typer.echo(f"{each.name:<20} {each.what}")
        return
    if soak is not None and (quick or drill or repeat > 1 or resume or minutes is not None):
        raise BadSettings(
            "soak: chooses its drills itself; give it without --quick, --drill, --repeat, --resume and --minutes"
        )
    if resume and json_file is None:
        raise BadSettings("resume: needs --json, the file of the run that was stopped")
    chosen = _chosen(quick, drill or [])
    for file in (json_file, markdown_file):
        if file is not None and not file.parent.is_dir():
            raise BadSettings(f"there is no folder {file.parent}")
    folder = run_dir or Path(tempfile.mkdtemp(prefix="kvberth-faults-"))
    console = Console(stderr=True)
    try:
        if soak is not None:
            is_passed = _soak(soak, seed, folder, console, json_file, markdown_file)
        else:
            is_passed = _rounds(chosen, repeat, seed, folder, console, json_file, markdown_file, resume, minutes)
    except (LaunchError, OSError) as error:
        raise RunFailed(f"{error}\nlogs are in {folder}") from error
    except KeyboardInterrupt as error:
        raise RunFailed("stopped before the end") from error
    if not is_passed:
        typer.echo(f"logs are in {folder}", err=True)
        raise typer.Exit(1)


def _rounds(
    drills: "list[Drill]",
    rounds: int,
    seed: int,
    folder: Path,
    console: Console,
    json_file: Path | None,
    markdown_file: Path | None,
    resume: bool,
    minutes: float | None,
) -> bool:
    """Do the drills; returns whether all that have been done have passed."""
    from kvberth.drills import plan_lines, plan_turns, report_of, run_drills, table_of  # noqa: PLC0415

    rows = _rows_before(json_file) if resume and json_file is not None else []
    try:
        turns = plan_turns(drills, rounds, seed, rows)
    except ValueError as error:
        raise BadSettings(f"resume: {json_file}: {error}") from error
    for line in plan_lines(turns, rows):
        console.print(line, highlight=False)

    def keep(row: "DrillRow") -> None:
        """As each one ends, so that a run which is stopped keeps what it has."""
        rows.append(row)
        _print_row(console, row)
        _write(json_file, lambda: _as_json(report_of(rows)))
        _write(markdown_file, lambda: table_of(rows).encode())

    limit = None if minutes is None else minutes * 60
    left = asyncio.run(run_drills(turns, run_dir=folder, console=console, on_row=keep, limit_seconds=limit))
    report = report_of(rows)
    _print_sums(report)
    if left:
        typer.echo(f"{left} drills are left; --resume goes on")
    return not report.failed


def _soak(
    seconds: float, seed: int, folder: Path, console: Console, json_file: Path | None, markdown_file: Path | None
) -> bool:
    """The long run; returns whether it has passed."""
    from kvberth.drills import report_of, soak, soak_page  # noqa: PLC0415

    rows: list[DrillRow] = []

    def keep(row: "DrillRow") -> None:
        """What there is of a run that is stopped."""
        rows.append(row)
        _print_row(console, row)
        _write(json_file, lambda: _as_json(report_of(rows)))

    report = asyncio.run(soak(seconds, seed=seed, run_dir=folder, console=console, on_row=keep))
    _write(json_file, lambda: _as_json(report))
    _write(markdown_file, lambda: soak_page(report).encode())
    _print_memory(report)
    _print_sums(report.drills)
    for problem in report.problems:
        typer.echo(problem)
    return report.has_passed


def _rows_before(file: Path) -> "list[DrillRow]":
    """Of the run that wrote the file; none if there is no such file yet."""
    import msgspec  # noqa: PLC0415

    from kvberth.drills import Report  # noqa: PLC0415

    if not file.exists():
        return []
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report).rows
    except msgspec.MsgspecError as error:
        raise BadSettings(f"resume: {file} is not what kvberth faults writes: {error}") from error


def _write(file: Path | None, content: Callable[[], bytes]) -> None:
    """In place of what is there, in one step: a run may be stopped at any moment."""
    if file is not None:
        new = file.with_name(f"{file.name}.new")
        new.write_bytes(content())
        new.replace(file)


def _chosen(quick: bool, names: list[str]) -> "list[Drill]":
    from kvberth.drills import DRILLS, QUICK, find  # noqa: PLC0415

    if quick and names:
        raise BadSettings("quick: give either --quick or --drill, not both")
    if not quick and not names:
        return list(DRILLS)
    try:
        return [find(each) for each in (QUICK if quick else names)]
    except KeyError as error:
        known = ", ".join(each.name for each in DRILLS)
        raise BadSettings(f"drill: there is no {error.args[0]!r}; there are {known}") from error


def _as_json(report: "Report | SoakReport") -> bytes:
    import msgspec  # noqa: PLC0415

    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def _print_row(console: Console, row: "DrillRow") -> None:
    name = f"{row.drill} (round {row.round}, seed {row.seed})"
    if row.skipped is not None:
        console.print(f"[yellow]-[/] {name}: skipped, {row.skipped}")
        return
    mark = "[red]✗[/]" if row.problems else "[green]✓[/]"
    left = f", {row.left} left" if row.left else ""
    felt = f"; {row.felt} {row.trace}" if row.trace else ""
    console.print(
        f"{mark} {name}: {row.right} of {row.requests} right, {row.refused} refused{left}{felt} ({row.seconds:.0f} s)",
        highlight=False,
    )
    for problem in row.problems:
        console.print(f"    {problem}", markup=False, highlight=False, soft_wrap=True)


def _print_memory(result: "SoakReport") -> None:
    typer.echo(f"{result.seconds:.0f} s at {result.rate:.1f} requests/s, of {result.capacity:.1f} that it can do")
    for each in result.memory:
        low, high = each.slope.interval
        typer.echo(
            f"{each.name}: {each.mean_bytes / 1e6:.0f} MB, {each.slope.bytes_per_hour / 1e6:+.1f} MB per hour "
            f"({low / 1e6:+.1f} to {high / 1e6:+.1f}) over {each.hours * 60:.0f} minutes"
        )


def _print_sums(report: "Report") -> None:
    typer.echo(
        f"{report.drills} drills, {report.failed} failed, {report.skipped} skipped; {report.requests} requests: "
        f"{report.right} right, {report.refused} refused, {report.left} left, {report.broken} broken, "
        f"{report.wrong} wrong, {report.hung} hung; {report.leaked_blocks} blocks leaked, "
        f"{report.corruptions} corruptions"
    )
