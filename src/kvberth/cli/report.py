"""`kvberth report`: a comparison's report again, from its records."""

import importlib
import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvberth.cli.errors import BadSettings, RunFailed

if TYPE_CHECKING:
    from kvberth.compare import Comparison, Folder

__all__ = ["Format", "needs_report_packages", "report", "show", "write_report"]


class Format(StrEnum):
    """What is printed; report.html and summary.json are written in any case."""

    TABLE = "table"
    MARKDOWN = "md"
    JSON = "json"
    CSV = "csv"


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `kvberth compare --out DIR` has made.")],
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="In place of the one that the comparison was begun with.")
    ] = None,
    gpus_per_engine: Annotated[int | None, typer.Option(min=1, help="Likewise.")] = None,
    output: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.TABLE,
) -> None:
    """Make summary.json and report.html of a comparison again, from its records alone."""
    from kvberth.compare import Folder  # noqa: PLC0415

    needs_report_packages()
    if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour < float("inf"):
        raise BadSettings(f"price_per_gpu_hour: must be 0 or more, not {price_per_gpu_hour:g}")
    opened = Folder(folder)
    show(write_report(opened, price_per_gpu_hour, gpus_per_engine), output, opened)


def needs_report_packages() -> None:
    """That a report cannot be made is found out before anything is measured."""
    lacking = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if lacking:
        raise BadSettings(f"{' and '.join(lacking)} must be installed for the report: pip install 'kvberth[compare]'")
    importlib.import_module("kvberth.compare.report")


def write_report(
    folder: "Folder", price_per_gpu_hour: float | None = None, gpus_per_engine: int | None = None
) -> "Comparison":
    """Make summary.json and report.html. Raises `RunFailed` if that is not possible."""
    from kvberth.compare import CompareError, load, to_json  # noqa: PLC0415
    from kvberth.compare.report import to_html  # noqa: PLC0415

    try:
        comparison = load(folder, price_per_gpu_hour=price_per_gpu_hour, gpus_per_engine=gpus_per_engine)
        folder.write(folder.summary_path, to_json(comparison))
        folder.write(folder.report_path, to_html(comparison, folder.measured()).encode())
    except CompareError as error:
        raise RunFailed(str(error)) from error
    return comparison


def show(comparison: "Comparison", output: Format, folder: "Folder") -> None:
    """Print it."""
    from kvberth.compare import to_csv, to_json, to_markdown, to_tables  # noqa: PLC0415

    if output is Format.JSON:
        typer.echo(to_json(comparison).decode(), nl=False)
    elif output is Format.CSV:
        typer.echo(to_csv(comparison), nl=False)
    elif output is Format.MARKDOWN:
        typer.echo(to_markdown(comparison), nl=False)
    else:
        console = Console(highlight=False)
        for table in to_tables(comparison):
            console.print(table)
        for line in (comparison.verdict.headline, *comparison.verdict.points, *comparison.verdict.doubts):
            console.print(line, markup=False)
        console.print(f"report  {folder.report_path}", soft_wrap=True)
