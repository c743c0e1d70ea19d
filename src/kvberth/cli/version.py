"""`kvberth version`: what a bug report needs."""

import json
import platform

import typer

from kvberth.cli.options import Json
from kvberth.cli.packages import installed_version, installed_vllm

__all__ = ["version"]


def version(as_json: Json = False) -> None:
    """Print the versions of kvberth, its protocol and what it runs on."""
    from kvberth.protocol import PROTOCOL_VERSION  # noqa: PLC0415

    vllm_distribution, vllm = installed_vllm() or (None, None)
    versions = {
        "kvberth": installed_version("kvberth"),
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "vllm": vllm,
        "vllm_distribution": vllm_distribution,
        "nixl": installed_version("nixl"),
        "torch": installed_version("torch"),
    }
    if as_json:
        typer.echo(json.dumps(versions))
        return
    for name, found in versions.items():
        typer.echo(f"{name.replace('_', ' '):<18} {'not installed' if found is None else found}")
