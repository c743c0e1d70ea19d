"""Puts the commands together. What each one does is in its own module."""

import typer

from kvberth.cli.bench import bench
from kvberth.cli.compare import compare
from kvberth.cli.doctor import doctor
from kvberth.cli.emulator import emulator
from kvberth.cli.errors import OneLineErrors
from kvberth.cli.faults import faults
from kvberth.cli.keys import keys
from kvberth.cli.report import report
from kvberth.cli.router import router
from kvberth.cli.up import up
from kvberth.cli.version import version

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvberth",
    cls=OneLineErrors,
    help="Prefill and decode apart on stock vLLM: the KV cache goes over by push or by pull, in the background.",
    epilog="Settings come from a TOML file (--config), the environment (such as KVBERTH_UP_PREFILL) and flags; "
    "of these, the later one counts.",
    context_settings={"auto_envvar_prefix": "KVBERTH", "help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,  # its tables cut long option names off at 80 columns
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(router)
app.command()(bench)
app.command()(compare)
app.command()(report)
app.command()(faults)
app.command()(doctor)
app.command()(version)
app.add_typer(keys, name="keys")
app.add_typer(emulator, name="emulator")


def main() -> None:
    """Entry point. Ends the process: 0 for success, 1 where something failed, 2 for bad arguments or settings."""
    app(prog_name="kvberth")
