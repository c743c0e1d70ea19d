"""`kvberth compare`: ways to hand over, side by side on the same traffic."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvberth.cli.errors import BadSettings, RunFailed
from kvberth.cli.given import refuse_given, warn_of_skipped
from kvberth.cli.options import Arrivals, Config
from kvberth.cli.report import Format, needs_report_packages, show, write_report
from kvberth.cli.signals import terminate_like_ctrl_c

if TYPE_CHECKING:
    from kvberth.compare import CompareSettings, Folder, Progress

__all__ = ["compare"]


def compare(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for records, summary and report.")],
    emulate: Annotated[
        str | None, typer.Option(help="A profile of the emulated accelerator, or its .toml file; no GPU needed.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="In place of a profile: a model, as for vLLM.")] = None,
    attach: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE=URL", help="A running deployment; nothing is started then. Repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: one repetition of four cells, under ten minutes.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="The published grid: all modes, and cells with caches and small chunks.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with DIR, begun with the same settings.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be measured and how long it takes; start nothing.")
    ] = False,
    config: Config = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="MODE,...",
            help="Of push, push-whole, pull, vllm-pull, vllm-push, vllm-pull-inline, vllm-push-inline, colocated; "
            "all but the inline ones if not given.",
        ),
    ] = None,
    rates: Annotated[str | None, typer.Option(metavar="RATE,...", help="Requests per second [1,2,4,8].")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="TOKENS,...", help="Prompt lengths [1024,4096,16384].")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens per answer [128]. A trace has its own.")] = None,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(help="Random gaps, a fixed rate [uniform], or a trace's own times: the default if it has some."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded traffic in place of --prompts, as for `kvberth bench`."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of a trace, its first.")] = 100,
    speed: Annotated[
        str, typer.Option(metavar="SPEED,...", help="How much faster than it was recorded to replay a trace.")
    ] = "1",
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out what in a trace cannot be sent.")
    ] = False,
    prefix_share: Annotated[
        float, typer.Option(help="How much of a prompt, 0 to below 1, others have too, at its beginning.")
    ] = 0.0,
    prefixes: Annotated[int, typer.Option(help="Number of different beginnings.")] = 1,
    turns: Annotated[
        int, typer.Option(min=1, help="Requests per conversation: each has those before it in its prompt.")
    ] = 1,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Of all engines [on with --trace, --turns and --prefix-share, else off].",
        ),
    ] = None,
    cancel_share: Annotated[
        float, typer.Option(help="Of the requests, from 0 to 1, that clients give up in the middle of the answer.")
    ] = 0.0,
    cancel_seconds: Annotated[
        float | None, typer.Option(help="Give them up at a random time within these seconds instead.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Of sending, per cell [10].")] = None,
    repetitions: Annotated[
        int | None, typer.Option(help="Each with fresh engines, modes in another order [3].")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same traffic.")] = 0,
    emulate_link: Annotated[
        bool, typer.Option("--emulate-link", help="Emulated transfers take the true bytes' time on the profile's link.")
    ] = False,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="One argument for every engine of every mode. Repeatable.")
    ] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="Adds what a request costs.")] = None,
    gpus_per_engine: Annotated[int, typer.Option(help="For that price.")] = 1,
    output: Annotated[Format, typer.Option("--format", help="What to print at the end.")] = Format.TABLE,
) -> None:
    """Run each mode on the same traffic, with engines of its own, and say which one this traffic wants.

    Exit status: 0 when all cells were measured, 1 when something is missing, 2 for a bad argument.
    """
    from kvberth.compare import Folder, FolderError, begin, plan_table, say_plan  # noqa: PLC0415
    from kvberth.compare import compare as measure  # noqa: PLC0415

    del config  # its callback has used it
    needs_report_packages()
    if quick and published:
        raise BadSettings("quick, published: only one of them makes sense")
    given = {
        "modes": _split("modes", modes, str),
        "rates": _split("rates", rates, float),
        "prompts": _split("prompts", prompts, int),
        "seconds": seconds,
        "repetitions": repetitions,
        "output_tokens": output_tokens,
        "arrivals": str(arrivals) if arrivals is not None else None,
        "prefix_share": prefix_share,
        "prefixes": prefixes,
        "turns": turns,
        "prefix_caching": prefix_caching,
        "cancel_share": cancel_share,
        "cancel_seconds": cancel_seconds,
        "seed": seed,
        "emulate_link": emulate_link,
        "engine_args": tuple(engine_arg or ()),
        "price_per_gpu_hour": price_per_gpu_hour,
        "gpus_per_engine": gpus_per_engine,
    }
    what = _what(emulate, model, attach or [])
    if trace is None:
        refuse_given(context, "needs a trace", "requests", "speed", "skip_bad_rows")
    else:
        refuse_given(context, "a trace has its own", "prompts", "seconds", "prefix_share", "prefixes")
        speeds = _split("speed", speed, float) or ()
        what |= _trace(context, trace, arrivals, requests, turns, speeds, skip_bad_rows=skip_bad_rows)
    settings = _settings(what, given, quick=quick, published=published)
    if dry_run:
        Console(highlight=False).print(plan_table(settings), say_plan(settings))
        return
    folder = Folder(out)
    console = Console(stderr=True)
    try:
        begin(settings, folder, resume=resume)
    except FolderError as error:
        raise BadSettings(f"out: {error}") from error
    console.print(say_plan(settings), soft_wrap=True, highlight=False)
    stopped = False
    try:
        with terminate_like_ctrl_c(), _progress(console) as on_progress:
            try:
                measure(settings, folder, on_progress)
            except KeyboardInterrupt:
                stopped = True
    except FolderError as error:
        _write_report_if_possible(folder)
        raise RunFailed(f"{error}; the cells that were measured are kept, and --resume goes on") from error
    comparison = write_report(folder, price_per_gpu_hour, gpus_per_engine)
    show(comparison, output, folder)
    _say_what_is_missing(folder, len(comparison.missing), stopped=stopped)


def _write_report_if_possible(folder: "Folder") -> None:
    """After a failure that the disk may have caused: a report would be good to have, and is no condition."""
    try:
        write_report(folder)
    except RunFailed as error:
        typer.echo(f"no report: {error.format_message()}", err=True)


def _what(emulate: str | None, model: str | None, attach: Sequence[str]) -> dict[str, Any]:
    """What answers: a profile, a model, or running deployments."""
    from kvberth.emulator import EmulatorError, load_profile  # noqa: PLC0415

    if sum(map(bool, (emulate, model, attach))) != 1:
        raise BadSettings("emulate, model, attach: give exactly one of them")
    if emulate is not None:
        try:
            load_profile(emulate)
        except EmulatorError as error:
            raise BadSettings(f"emulate: {error}") from error
        return {"model": emulate, "emulate": True}
    if model is not None:
        return {"model": model}
    pairs = [each.partition("=") for each in attach]
    if wrong := [name for name, equals, url in pairs if not (name and equals and url.startswith("http"))]:
        raise BadSettings(f"attach: {wrong[0]!r} must be MODE=URL, such as push=http://127.0.0.1:8000")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise BadSettings("attach: each mode needs a name of its own")
    return {"attach": {name: url.rstrip("/") for name, _, url in pairs}}


def _trace(
    context: typer.Context,
    path: Path,
    arrivals: Arrivals | None,
    requests: int,
    turns: int,
    speeds: tuple[float, ...],
    *,
    skip_bad_rows: bool,
) -> dict[str, Any]:
    """What a trace decides: of output tokens and arrivals, only what is not given."""
    from kvberth.bench import TraceError  # noqa: PLC0415
    from kvberth.compare import choose_trace  # noqa: PLC0415

    try:
        choice, trace = choose_trace(path, requests=requests, turns=turns, speeds=speeds, skip_bad_rows=skip_bad_rows)
    except (TraceError, ValueError) as error:
        raise BadSettings(f"trace: {error}") from error
    warn_of_skipped(trace)
    arrivals = arrivals or (Arrivals.TRACE if choice.rate else Arrivals.POISSON)
    if arrivals == Arrivals.TRACE:
        refuse_given(context, "the trace's times decide; set --speed, or --arrivals poisson", "rates")
    else:
        refuse_given(context, f"is for arrivals trace; for {arrivals} set --rates", "speed")
    return {"trace": choice, "arrivals": str(arrivals), "output_tokens": None}


def _settings(what: dict[str, Any], given: dict[str, Any], *, quick: bool, published: bool) -> "CompareSettings":
    from kvberth.bench import TraceError  # noqa: PLC0415
    from kvberth.compare import check_traffic  # noqa: PLC0415
    from kvberth.compare import settings as presets  # noqa: PLC0415

    preset = presets.quick() if quick else presets.published() if published else {}
    chosen = preset | what | {name: value for name, value in given.items() if value is not None}
    if not what.get("emulate") and given["modes"] is None:
        chosen["modes"] = tuple(mode for mode in chosen.get("modes", presets.DEFAULT_MODES) if "vllm" not in mode)
    try:
        settings = presets.make(chosen)
        check_traffic(settings)
    except (TraceError, ValueError) as error:
        raise BadSettings(str(error)) from error
    return settings


def _split(name: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise BadSettings(f"{name}: {text!r} must be numbers with commas between them, such as 1,2,4") from error


@contextmanager
def _progress(console: Console) -> "Iterator[Callable[[Progress], None]]":
    """Cells done and the time left; on a terminal as a bar, else as lines. Drawn by no thread of its own."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn  # noqa: PLC0415
    from rich.progress import Progress as ProgressBar  # noqa: PLC0415

    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("cells  {task.fields[left]}  {task.description}"),
    )
    with ProgressBar(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None, left="")

        def show_progress(progress: "Progress") -> None:
            left = f"{progress.seconds_left / 60:.0f} min left" if progress.seconds_left is not None else ""
            if console.is_terminal:
                bar.update(
                    task,
                    description=progress.doing,
                    left=left,
                    total=progress.cells_total,
                    completed=progress.cells_done,
                )
                bar.refresh()
            else:
                console.print(
                    f"{progress.cells_done}/{progress.cells_total} cells, {left}: {progress.doing}", soft_wrap=True
                )

        yield show_progress


def _say_what_is_missing(folder: "Folder", missing: int, *, stopped: bool) -> None:
    for incident in folder.incidents():
        typer.echo(f"{incident.time} {incident.what[:400]}", err=True)
    if stopped:
        raise RunFailed(f"stopped with {missing} cells missing; --resume goes on")
    if missing:
        raise RunFailed(f"{missing} cells could not be measured; the lines above say why, and --resume tries again")
