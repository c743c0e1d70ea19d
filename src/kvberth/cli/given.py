"""What a user has set, as against what a command takes by default; and how recorded traffic is chosen."""

from typing import TYPE_CHECKING

import typer

from kvberth.cli.errors import BadSettings

if TYPE_CHECKING:
    from kvberth.bench import Trace

__all__ = ["is_given", "refuse_given", "warn_of_skipped"]


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user has set it: by flag, environment or settings file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def refuse_given(context: typer.Context, reason: str, *names: str) -> None:
    """What a user has set, and what would have no effect, is an error and not a surprise."""
    for name in names:
        if is_given(context, name):
            raise BadSettings(f"{name}: {reason}")


def warn_of_skipped(trace: "Trace") -> None:
    """Rows of a trace that are left out, on stderr."""
    if trace.skipped:
        first = trace.skipped[0]
        typer.echo(
            f"warning: {len(trace.skipped)} rows of {trace.path} left out; the first is line {first.line}: "
            f"{first.reason}",
            err=True,
        )
