"""Where a process of a cluster runs, if that is not simply on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A corner of the machine with an address of its own, such as a network namespace.

    Attributes:
        host: the address at which the process listens; None is the cluster's.
        port: of its HTTP server; None finds a free one.
        prefix: what stands before its command, such as `ip netns exec ...`.
        env: environment variables on top of the others.
        connector_config: settings of its connector on top of the cluster's.
        engine_args: further arguments, behind all others.
    """

    host: str | None = None
    port: int | None = None
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
