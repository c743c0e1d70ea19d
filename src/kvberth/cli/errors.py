"""How the command ends when it cannot go on: one line for what the user can put right, and an exit status.

An exception that is not in here is a mistake of ours and keeps its traceback.
"""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["BadSettings", "OneLineErrors", "RunFailed"]


class BadSettings(typer.TyperException):
    """What the user asked for is not possible; the text says what would be."""

    exit_code = 2


class RunFailed(typer.TyperException):
    """The settings are right, but the work failed; the text may end with lines of a log."""

    exit_code = 1


class OneLineErrors(TyperGroup):
    """The root command. In place of typer's boxed error beneath a usage text it prints one line to stderr."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            status = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.TyperException as error:
            if not standalone_mode:
                raise
            print(f"kvberth: {_text(error)}", file=sys.stderr)
            sys.exit(error.exit_code)
        if standalone_mode:
            sys.exit(status)
        return status


def _text(error: typer.TyperException) -> str:
    """Our own texts as they are; typer's on one line, with what the user needs to find the value and the help."""
    message = error.format_message()
    if isinstance(error, BadSettings | RunFailed):
        return message
    message = " ".join(message.replace("Value error, ", "").split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    return f"{message}{_origin(error, context)}; see '{context.command_path} --help'"


def _origin(error: typer.TyperException, context: typer.Context) -> str:
    """Where a bad value came from, unless it was a flag: the message names the flag in any case."""
    parameter = getattr(error, "param", None)
    source = context.get_parameter_source(parameter.name) if parameter is not None else None
    if source is None or parameter is None:
        return ""
    if source.name == "ENVIRONMENT":
        return f" (from {parameter.envvar or f'{context.auto_envvar_prefix}_{parameter.name.upper()}'})"
    if source.name == "DEFAULT_MAP":
        return f" (from [{context.info_name}] in {context.params.get('config')})"
    return ""
