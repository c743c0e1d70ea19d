"""Runs the probes and prints what they return."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvberth.cli.doctor.check import Check, Status
from kvberth.cli.options import Json

__all__ = ["doctor"]

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
_PROBES_AT_ONCE = 4


def doctor(
    as_json: Json = False,
    control_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A secret key that is to be used here: look at it too.")
    ] = None,
    control_peers_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The public keys that are to be accepted: look at them too.")
    ] = None,
) -> None:
    """Look whether this machine can run engines and router; exit status 1 if anything fails."""
    from kvberth.cli.doctor import keys  # noqa: PLC0415

    probes = list(_probes())
    if control_key_file is not None:
        probes.append(lambda: keys.probe_key_file(control_key_file))
    if control_peers_dir is not None:
        probes.append(lambda: keys.probe_peers(control_peers_dir))
    checks = _run(probes)
    passed = all(check.status is not Status.FAIL for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": passed, "checks": [asdict(check) for check in checks]}))
    else:
        Console(highlight=False).print(_table(checks))
    if not passed:
        raise typer.Exit(1)


def _probes() -> Sequence[Callable[[], Check]]:
    """In the order of the rows: what later ones rest on comes first."""
    from kvberth.cli.doctor import libraries, machine  # noqa: PLC0415

    return (
        machine.probe_python,
        machine.probe_platform,
        libraries.probe_torch,
        libraries.probe_torch_companions,
        libraries.probe_vllm,
        libraries.probe_vllm_loads,
        libraries.probe_plugin,
        libraries.probe_nixl,
        libraries.probe_nixl_agent,
        machine.probe_memory,
        machine.probe_shared_memory,
        machine.probe_open_files,
        lambda: machine.probe_port("router port", 8000, "give the router another one with --port"),
        lambda: machine.probe_port("control port", 14579, "give prefill workers another kv_port"),
    )


def _run(probes: Sequence[Callable[[], Check]]) -> list[Check]:
    """All of them, several at once, since some wait for a process that imports a large library."""
    with _spinner(), ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="doctor") as pool:
        return list(pool.map(lambda probe: probe(), probes))


def _spinner() -> AbstractContextManager[object]:
    """On a terminal only, and not among the output."""
    return Console(stderr=True).status("Looking; loading vLLM may take half a minute")


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = check.found if check.advice is None else f"{check.found}\n→ {check.advice}"
        table.add_row(Text(check.status, style=_COLOURS[check.status]), check.name, Text(found))
    return table
