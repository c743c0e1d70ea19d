"""`kvberth faults`: a local cluster is broken on purpose, in many ways, and every request accounted for."""

import asyncio
import tempfile
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
    from kvberth.drills import DRILLS, report_of, run_drills, table_of  # noqa: PLC0415
    from kvberth.drills import soak as run_soak  # noqa: PLC0415
    from kvberth.launch import LaunchError  # noqa: PLC0415

    if list_them:
        for each in DRILLS:
            typer.echo(f"{each.name:<20} {each.what}")
        return
    if soak is not None and (quick or drill or repeat > 1):
        raise BadSettings("soak: chooses its drills itself; give it without --quick, --drill and --repeat")
    chosen = _chosen(quick, drill or [])
    for file in (json_file, markdown_file):
        if file is not None and not file.parent.is_dir():
            raise BadSettings(f"there is no folder {file.parent}")
    folder = run_dir or Path(tempfile.mkdtemp(prefix="kvberth-faults-"))
    console = Console(stderr=True)

    def keep(rows: "list[DrillRow]") -> None:
        """As rounds end, so that a run which is stopped keeps what it has."""
        _print_row(console, rows[-1])
        if json_file is not None:
            json_file.write_bytes(_as_json(report_of(rows)))
        if markdown_file is not None:
            markdown_file.write_text(table_of(rows))

    try:
        if soak is not None:
            result = asyncio.run(run_soak(soak, seed=seed, run_dir=folder, console=console, on_row=keep))
            report, problems = result.drills, result.problems
            _print_memory(result)
            if json_file is not None:
                json_file.write_bytes(_as_json(result))
        else:
            report = asyncio.run(
                run_drills(chosen, rounds=repeat, seed=seed, run_dir=folder, console=console, on_row=keep)
            )
            problems = []
    except (LaunchError, OSError) as error:
        raise RunFailed(f"{error}\nlogs are in {folder}") from error
    except KeyboardInterrupt as error:
        raise RunFailed("stopped before the end") from error
    _print_sums(report)
    for problem in problems:
        typer.echo(problem)
    if report.failed or problems:
        typer.echo(f"logs are in {folder}", err=True)
        raise typer.Exit(1)


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
    console.print(f"{mark} {name}: {row.right} of {row.requests} right, {row.refused} refused{left}", highlight=False)
    for problem in row.problems:
        console.print(f"    {problem}", markup=False, highlight=False, soft_wrap=True)


def _print_memory(result: "SoakReport") -> None:
    typer.echo(f"{result.seconds:.0f} s at {result.rate:.1f} requests/s, of {result.capacity:.1f} that it can do")
    for each in result.memory:
        typer.echo(
            f"{each.name}: {each.mean_bytes / 1e6:.0f} MB, {each.bytes_per_hour / 1e6:+.1f} MB per hour "
            f"(± {each.error_bytes_per_hour / 1e6:.1f}) over {each.hours * 60:.0f} minutes"
        )


def _print_sums(report: "Report") -> None:
    typer.echo(
        f"{report.drills} drills, {report.failed} failed, {report.skipped} skipped; {report.requests} requests: "
        f"{report.right} right, {report.refused} refused, {report.left} left, {report.broken} broken, "
        f"{report.wrong} wrong, {report.hung} hung; {report.leaked_blocks} blocks leaked, "
        f"{report.corruptions} corruptions"
    )
