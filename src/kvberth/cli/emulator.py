"""`kvberth emulator`: the profiles of the emulated accelerator, and making one from measurements."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvberth.cli.errors import BadSettings
from kvberth.cli.options import Json

if TYPE_CHECKING:
    from kvberth.emulator import Profile
    from kvberth.emulator.calibrate import Calibration

__all__ = ["emulator"]

PROMPT_TOKENS = 16384
CONTEXT_TOKENS = 1024
BATCHES = (1, 16)
"""What `profiles` gives times for."""

_UNIT_SIGNS = {"us": "µs", "ns": "ns", "ps": "ps"}

emulator = typer.Typer(
    help="Show the profiles of the emulated accelerator, or make one from measurements.", rich_markup_mode=None
)


@emulator.command()
def profiles(as_json: Json = False) -> None:
    """List the profiles that come with kvberth."""
    from kvberth.emulator import load_profile, profile_names  # noqa: PLC0415

    rows = [_key_figures(load_profile(name)) for name in profile_names()]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    console = Console(highlight=False)
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        console.print(f"{row['name']:<{width}}  {row['title']}", markup=False, soft_wrap=True)
    console.print()
    names = ("profile", "16k prefill", *(f"batch {size}" for size in BATCHES), "KV per token", "scale")
    table = Table(*names, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['prefill_16k_ms']:.1f} ms",
            *(f"{row[f'decode_step_batch_{size}_ms']:.2f} ms" for size in BATCHES),
            f"{row['kv_bytes_per_token']:,} B",
            f"{row['bytes_scale']:g}",
        )
    console.print(table)
    console.print(f"\nbatch: time of a decode step with {CONTEXT_TOKENS} tokens of context each", soft_wrap=True)
    console.print("scale: true bytes of KV that one stored or transferred byte stands for", soft_wrap=True)


@emulator.command()
def show(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="Name, or the path of a .toml file.")],
) -> None:
    """Print a profile as TOML, with the source of each figure."""
    from kvberth.emulator.profile import dump_profile  # noqa: PLC0415

    typer.echo(dump_profile(_load(name)), nl=False)


@emulator.command()
def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="Folders of `kvberth bench --out`.")],
    base: Annotated[
        str,
        typer.Option(metavar="PROFILE", help="Profile that all but the timing is taken from: a name or a .toml file."),
    ],
    name: Annotated[str, typer.Option(help="Name of the new profile.")],
    batched_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="--max-num-batched-tokens of the measured engine; the base's if not given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="File to write; NAME.toml if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a profile's timing to runs of `kvberth bench` against one real, undivided engine.

    Wanted: at least three prompt lengths at a low rate, such as --prompt-tokens 512, 4096 and 16384 with --rate 0.5,
    and a rate at which several requests decode at once. Each run with a --seed of its own.
    """
    from kvberth.emulator import EmulatorError  # noqa: PLC0415
    from kvberth.emulator.calibrate import calibrate as fit  # noqa: PLC0415
    from kvberth.emulator.calibrate import read_run  # noqa: PLC0415
    from kvberth.emulator.profile import dump_profile  # noqa: PLC0415

    path = _free_path(out or Path(f"{name}.toml"))
    try:
        calibration = fit([read_run(folder) for folder in runs], _load(base), name, batched_tokens=batched_tokens)
    except EmulatorError as error:
        raise BadSettings(str(error)) from error
    try:
        with path.open("x") as file:
            file.write(dump_profile(calibration.profile))
    except OSError as error:
        raise BadSettings(f"out: {path} cannot be written: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps(_as_dict(calibration, path)))
    else:
        _print_calibration(Console(highlight=False), calibration)
        typer.echo(f"profile  {path}")
    for warning in calibration.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _load(name: str) -> "Profile":
    from kvberth.emulator import EmulatorError, load_profile  # noqa: PLC0415

    try:
        return load_profile(name)
    except EmulatorError as error:
        raise BadSettings(str(error)) from error


def _free_path(path: Path) -> Path:
    """Looked at before anything is computed."""
    if path.suffix != ".toml":
        raise BadSettings(f"out: {path} must end in .toml, by which a profile is told from a name")
    if path.exists():
        raise BadSettings(f"out: {path} is there already; name a new one")
    return path


def _key_figures(profile: "Profile") -> dict[str, Any]:
    from kvberth.emulator.timing import Step, step_seconds  # noqa: PLC0415

    chunk = profile.engine.batched_tokens
    prompt = [(before, min(chunk, PROMPT_TOKENS - before)) for before in range(0, PROMPT_TOKENS, chunk)]
    prefill_seconds = sum(step_seconds(profile.timing, Step.of([each])) for each in prompt)
    decode_seconds = {size: step_seconds(profile.timing, Step.of([(CONTEXT_TOKENS, 1)] * size)) for size in BATCHES}
    return {
        "name": profile.name,
        "title": profile.title,
        "prefill_16k_ms": round(prefill_seconds * 1e3, 3),
        **{f"decode_step_batch_{size}_ms": round(seconds * 1e3, 3) for size, seconds in decode_seconds.items()},
        "kv_bytes_per_token": profile.true_token_bytes,
        "bytes_scale": profile.bytes_scale,
    }


def _as_dict(calibration: "Calibration", path: Path) -> dict[str, Any]:
    import dataclasses  # noqa: PLC0415

    result = dataclasses.asdict(calibration)
    return {"profile": result.pop("profile").name, "file": str(path), **result}


def _print_calibration(console: Console, calibration: "Calibration") -> None:
    table = Table("timing", "base", "fitted", "±", "unit")
    for column in table.columns[1:4]:
        column.justify = "right"
    for figure in calibration.figures:
        what, _, unit = figure.name.rpartition("_")
        doubt = "-" if figure.standard_error is None else f"{figure.standard_error:.2g}"
        fitted = "as base" if figure.kept_because else f"{figure.fitted:g}"
        table.add_row(what.replace("_", " "), f"{figure.base:g}", fitted, doubt, _UNIT_SIGNS[unit])
    console.print(table)
    for what, count, error in (
        ("gaps between tokens", calibration.gaps, calibration.gap_error),
        ("first tokens", calibration.first_tokens, calibration.first_token_error),
    ):
        console.print(f"{count} {what}, median error {error:.1%}")
    console.print(f"{calibration.overhead_ms:.2f} ms per request beside the model; not in the profile", soft_wrap=True)
