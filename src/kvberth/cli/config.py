"""The settings file: TOML, one table per command, keys named like the flags (`max_model_len` for `--max-model-len`).

The file becomes typer's defaults, so that environment and flags override it and values are checked in one place.
"""

import tomllib
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

import typer

from kvberth.cli.errors import BadSettings

__all__ = ["use_config_file"]


def use_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--config`: take the command's table of the file as its defaults.

    All tables are checked, not only this command's, so that a misspelt name is found the first time the file is used.

    Raises:
        BadSettings: the file cannot be read, or has a name or a kind of value that no command knows.
    """
    if path is None:
        return None
    commands = _configurable(context)
    tables = _read(path)
    _check_names(f"{path}", "table", tables, list(commands))
    defaults = {name: _defaults(f"{path}: [{name}]", table, commands[name]) for name, table in tables.items()}
    context.default_map = defaults.get(context.info_name or "", {})
    # Typer keeps a parameter's value only after this callback; the message on a bad value of the file needs it before.
    context.params["config"] = path
    return path


class _Kind(Enum):
    """What a setting takes."""

    TEXT = auto()
    LIST = auto()
    FLAG = auto()


def _configurable(context: typer.Context) -> dict[str, dict[str, _Kind]]:
    """Per command that takes a file, its settings."""
    assert context.parent is not None
    group: Any = context.parent.command
    settings = {
        name: {parameter.name: _kind(parameter) for parameter in command.params}
        for name, command in group.commands.items()
    }
    return {
        name: {key: kind for key, kind in keys.items() if key != "config"}
        for name, keys in settings.items()
        if "config" in keys
    }


def _kind(parameter: Any) -> _Kind:
    if getattr(parameter, "is_flag", False):
        return _Kind.FLAG
    return _Kind.LIST if parameter.multiple else _Kind.TEXT


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadSettings(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise BadSettings(f"{path}: is not TOML: {error}") from error


def _check_names(where: str, kind: str, given: Mapping[str, Any], known: list[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise BadSettings(f"{where}: unknown {kind} {unknown[0]!r}; known are {', '.join(known)}")


def _defaults(where: str, table: Any, settings: Mapping[str, _Kind]) -> dict[str, str | list[str]]:
    """A table as what the user might have typed. As text, since 2.7 or true must not pass for an integer."""
    if not isinstance(table, dict):
        raise BadSettings(f"{where}: must be a table of settings")
    _check_names(where, "key", table, list(settings))
    readers: dict[_Kind, Callable[[str, Any], str | list[str]]] = {
        _Kind.TEXT: _as_text,
        _Kind.LIST: _each_as_text,
        _Kind.FLAG: _flag_as_text,
    }
    return {key: readers[settings[key]](f"{where} {key}", value) for key, value in table.items()}


def _each_as_text(where: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise BadSettings(f'{where}: must be a list, such as ["..."]')
    return [_as_text(where, item) for item in value]


def _flag_as_text(where: str, value: Any) -> str:
    if not isinstance(value, bool):
        raise BadSettings(f"{where}: must be true or false, not {value}")
    return str(value).lower()


def _as_text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadSettings(f"{where}: must be text or a number, not {str(value).lower()}")
    return str(value)
