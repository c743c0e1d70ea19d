"""Options that several commands have."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvberth.cli.config import use_config_file

__all__ = [
    "Arrivals",
    "Binding",
    "Config",
    "ConnectorChoice",
    "DecodePolicy",
    "Json",
    "Mode",
    "PeerRole",
    "PrefillPolicy",
]


class Mode(StrEnum):
    """`kvberth.router.Mode` without the import of a web server; a test holds them equal."""

    PUSH = "push"
    PULL = "pull"


class PrefillPolicy(StrEnum):
    """`kvberth.router.choice.PrefillPolicy`, likewise."""

    QUEUE = "queue"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class DecodePolicy(StrEnum):
    """`kvberth.router.choice.DecodePolicy`, likewise."""

    FREE_KV = "free-kv"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class Binding(StrEnum):
    """`kvberth.router.binding.Binding`, likewise."""

    EARLY = "early"
    JIT = "jit"
    LATE = "late"
    AUTO = "auto"


class Arrivals(StrEnum):
    """`kvberth.bench.Arrivals` without the import of numpy; a test holds them equal."""

    POISSON = "poisson"
    UNIFORM = "uniform"
    TRACE = "trace"


class PeerRole(StrEnum):
    """`kvberth.keys.PeerRole`, likewise."""

    ENGINE = "engine"
    ROUTER = "router"


class ConnectorChoice(StrEnum):
    """`kvberth.launch.Connector` without the import of what starts clusters; a test holds them equal."""

    KVBERTH = "kvberth"
    VLLM = "vllm"


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="KVBERTH_CONFIG",
        is_eager=True,
        callback=use_config_file,
        help="TOML file with a table per command, such as [up] with prefill = 2.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
