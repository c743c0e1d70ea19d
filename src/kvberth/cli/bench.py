"""`kvberth bench`: load on one server, and the figures of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvberth.cli.errors import BadSettings, RunFailed
from kvberth.cli.given import is_given, refuse_given, warn_of_skipped
from kvberth.cli.options import Arrivals, Config, Json

if TYPE_CHECKING:
    from kvberth.bench import Percentiles, Plan, Progress, RecordFile, RunResult, Target, Trace, Traffic

__all__ = ["bench"]

RECORDS = "requests.jsonl"
SUMMARY = "summary.json"

_SHOWN_HEADERS = "x-kvberth"
"""Headers that begin so are part of the result. The values of others may be secrets."""


def bench(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server: an engine or a router.")],
    model: Annotated[str | None, typer.Option(help="Model to ask for; the first of /v1/models if not given.")] = None,
    config: Config = None,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 4.0,
    requests: Annotated[int, typer.Option(help="Number of requests; of a trace, its first.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 1024,
    output_tokens: Annotated[int, typer.Option(help="Tokens per answer. A trace has its own.")] = 128,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(help="Random gaps, a fixed rate, or a trace's own times: the default for a trace that has some."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same traffic.")] = 0,
    warmup: Annotated[int, typer.Option(help="Requests to send before, one after another; not measured.")] = 2,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time for one request.")] = 120.0,
    token_range: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Prompts are random token ids from LOW to below HIGH.")
    ] = "1000:20000",  # noqa: S107 - tokens of text
    prefix_share: Annotated[
        float, typer.Option(help="How much of a prompt, 0 to below 1, others have too, at its beginning.")
    ] = 0.0,
    prefixes: Annotated[int, typer.Option(help="Number of different beginnings.")] = 1,
    turns: Annotated[
        int, typer.Option(help="Requests per conversation: each has those before it, and their answers, in its prompt.")
    ] = 1,
    cancel_share: Annotated[
        float, typer.Option(help="How many requests, 0 to 1, are given up, after a random number of tokens.")
    ] = 0.0,
    cancel_seconds: Annotated[
        float | None, typer.Option(help="Give them up at a random time within these seconds instead.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded traffic: Mooncake, ShareGPT, BurstGPT, Azure, or JSON lines."),
    ] = None,
    speed: Annotated[float, typer.Option(help="How much faster than it was recorded to replay a trace.")] = 1.0,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out, and count, what in a trace cannot be sent.")
    ] = False,
    header: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Header of each request. Repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Folder for {RECORDS} and {SUMMARY}; made if need be.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send requests at planned times, whether or not earlier ones are answered, and measure the answers.

    Exit status: 0 when no request failed, 1 when one did, 2 for a bad argument, 3 when the generator fell behind its
    plan: the figures are then those of another load.
    """
    from kvberth.bench import Target  # noqa: PLC0415

    del config  # its callback has used it
    common = {
        "requests": requests,
        "rate": rate,
        "token_range": _token_range(token_range),
        "cancel_share": cancel_share,
        "cancel_seconds": cancel_seconds,
        "warmup": warmup,
        "seed": seed,
    }
    made_up = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prefix_share": prefix_share,
        "prefixes": prefixes,
        "turns": turns,
    }
    try:
        target = Target(url=url, model=model, headers=_headers(header or []), timeout_seconds=timeout)
        if trace is None:
            refuse_given(context, "needs a trace", "speed", "skip_bad_rows")
            traffic = _random_traffic(arrivals, **common, **made_up)
        else:
            refuse_given(context, "a trace has its own", "prompt_tokens", "prefix_share", "prefixes")
            recorded = _read_trace(trace, requests, turns, skip_bad_rows)
            tokens = output_tokens if is_given(context, "output_tokens") else None
            traffic = _trace_traffic(context, recorded, arrivals, speed=speed, output_tokens=tokens, **common)
    except ValueError as error:
        raise BadSettings(str(error)) from error
    started = datetime.now(UTC)
    plan = traffic.plan()
    with nullcontext() if out is None else _record_file(out) as records:
        result = _measure(plan, target, records)
    sent = traffic.settings() | {"sha256": plan.sha256()}
    report = {"environment": _environment(sent, target, result.model, started), "summary": result.summary}
    if out is not None:
        (out / SUMMARY).write_bytes(_as_json(report, indent=2))
    if as_json:
        typer.echo(_as_json(report, indent=0))
    else:
        _print_result(Console(highlight=False), result)
        if out is not None:
            typer.echo(f"records  {out / RECORDS}")
    for warning in result.summary.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if result.summary.failed:
        raise typer.Exit(1)
    if not result.summary.kept_up:
        raise typer.Exit(3)


def _random_traffic(arrivals: Arrivals | None, **settings: Any) -> "Traffic":
    from kvberth.bench import Arrivals as TrafficArrivals  # noqa: PLC0415
    from kvberth.bench import RandomTraffic  # noqa: PLC0415

    if arrivals == Arrivals.TRACE:
        raise BadSettings("arrivals: trace needs a trace, with --trace FILE")
    return RandomTraffic(arrivals=TrafficArrivals(arrivals or Arrivals.POISSON), **settings)


def _read_trace(path: Path, requests: int, turns: int, skip_bad_rows: bool) -> "Trace":
    from kvberth.bench import TraceError, read_trace  # noqa: PLC0415

    try:
        trace = read_trace(path, requests=requests, turns=turns, skip_bad_rows=skip_bad_rows)
    except TraceError as error:
        raise BadSettings(f"trace: {error}") from error
    warn_of_skipped(trace)
    return trace


def _trace_traffic(context: typer.Context, trace: "Trace", arrivals: Arrivals | None, **settings: Any) -> "Traffic":
    from kvberth.bench import Arrivals as TrafficArrivals  # noqa: PLC0415
    from kvberth.bench import TraceTraffic  # noqa: PLC0415

    arrivals = arrivals or (Arrivals.TRACE if trace.time_unit else Arrivals.POISSON)
    if arrivals == Arrivals.TRACE:
        refuse_given(context, "the trace's times decide; set --speed, or --arrivals poisson", "rate")
    return TraceTraffic(trace=trace, arrivals=TrafficArrivals(arrivals), **settings)


def _headers(given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if wrong := [name for name, equals, _ in pairs if not (name.strip() and equals)]:
        raise BadSettings(f"header: {wrong[0]!r} must be K=V, such as x-kvberth-mode=pull")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _token_range(text: str) -> tuple[int, int]:
    try:
        low, high = (int(part) for part in text.split(":"))
    except ValueError as error:
        raise BadSettings(f"token_range: {text!r} must be LOW:HIGH, such as 1000:20000") from error
    return low, high


def _record_file(folder: Path) -> "RecordFile":
    """Opened before anything is sent: that a result cannot be written is not found out at its end."""
    from kvberth.bench import RecordFile  # noqa: PLC0415

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return RecordFile(folder / RECORDS)
    except FileExistsError as error:
        raise BadSettings(f"out: {folder} has results already, or is no folder; name a new one") from error
    except OSError as error:
        raise BadSettings(f"out: {folder} cannot be written: {error.strerror}") from error


def _measure(plan: "Plan", target: "Target", records: "RecordFile | None") -> "RunResult":
    from kvberth.bench import BenchError, run_blocking  # noqa: PLC0415

    keep = records.write if records else lambda _: None
    try:
        with _progress_bar(Console(stderr=True)) as show:
            return run_blocking(plan, target, on_progress=show, on_record=keep)
    except BenchError as error:
        raise RunFailed(str(error)) from error
    except KeyboardInterrupt as error:
        kept = f"; the requests that had ended are in {records.path}" if records else ""
        raise RunFailed(f"stopped before the end{kept}") from error


@contextmanager
def _progress_bar(console: Console) -> "Iterator[Callable[[Progress], None]]":
    """Sent, done, failed and the time left, on a terminal. Drawn once a second and by no thread of its own."""
    from rich.progress import BarColumn, TextColumn  # noqa: PLC0415
    from rich.progress import Progress as ProgressBar  # noqa: PLC0415

    text = TextColumn("{task.description}")
    with ProgressBar(
        text, BarColumn(), console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("warming up", total=None)
        bar.refresh()

        def show(progress: "Progress") -> None:
            left = max(0.0, progress.planned_seconds - progress.elapsed_seconds)
            what = f"{progress.sent}/{progress.total} sent  {progress.done} done  {progress.failed} failed  " + (
                f"{left:.0f} s left" if left else "last answers"
            )
            bar.update(task, description=what, total=progress.total, completed=progress.done)
            bar.refresh()

        yield show


def _environment(traffic: dict[str, Any], target: "Target", model: str, started: datetime) -> dict[str, Any]:
    """Where the figures came from."""
    from kvberth.bench import machine, versions  # noqa: PLC0415

    return {
        "started": started.isoformat(timespec="seconds"),
        "url": target.url,
        "model": model,
        "headers": _without_secrets(target.headers),
        "timeout_seconds": target.timeout_seconds,
        "traffic": traffic,
        "versions": versions(),
        "machine": machine(),
    }


def _without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value if name.lower().startswith(_SHOWN_HEADERS) else "***" for name, value in headers.items()}


def _as_json(report: Mapping[str, Any], indent: int) -> bytes:
    import msgspec  # noqa: PLC0415

    text = msgspec.json.encode(report)
    return msgspec.json.format(text, indent=indent) + b"\n" if indent else text


def _print_result(console: Console, result: "RunResult") -> None:
    summary = result.summary
    given_up = f", {summary.cancelled} were cancelled" if summary.cancelled else ""
    console.print(
        f"{summary.succeeded} of {summary.requests} requests succeeded{given_up} in {summary.duration_seconds:.1f} s: "
        f"{summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:.0f} output tokens/s"
    )
    for kind, count in summary.failures.items():
        example = next(record.error for record in result.records if record.failure_kind == kind)
        console.print(f"{count} failed: {example}", markup=False, soft_wrap=True)
    table = Table("ms", *(("mean", "p50", "p95", "p99")))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in (
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("E2E latency", summary.e2e_ms),
        ("sent late", summary.late_ms),
    ):
        table.add_row(name, *_cells(figures))
    console.print(table)
    if summary.idle_share is not None:
        console.print(f"The machine was {summary.idle_share:.0%} idle.")


def _cells(figures: "Percentiles | None") -> list[str]:
    if figures is None:
        return ["-"] * 4
    return [f"{value:.2f}" for value in (figures.mean, figures.p50, figures.p95, figures.p99)]
