"""Transitions as a table: which event is allowed in which state, and where it may lead."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from kvberth.protocol.errors import UnexpectedEvent

__all__ = ["Table", "allowed_targets", "check_target", "mermaid", "to"]

Table = Mapping[tuple[StrEnum, type[Any]], frozenset[StrEnum]]
"""For every (state, event) that can happen: the states that it may lead to. What is absent is a bug."""


def to(*states: StrEnum) -> frozenset[StrEnum]:
    """The states that an entry of a table may lead to."""
    return frozenset(states)


def allowed_targets(table: Table, subject: object, state: StrEnum, event: object) -> frozenset[StrEnum]:
    """Where `event` may lead from `state`.

    Raises:
        UnexpectedEvent: nowhere, the table does not have it.
    """
    targets = table.get((state, type(event)))
    if targets is None:
        raise UnexpectedEvent(f"transfer {subject}: no {type(event).__name__} in state {state}")
    return targets


def check_target(targets: frozenset[StrEnum], subject: object, event: object, state: StrEnum) -> None:
    """Hold the state that a handler chose against the table.

    Raises:
        UnexpectedEvent: the table does not have it.
    """
    if state not in targets:
        raise UnexpectedEvent(
            f"transfer {subject}: {type(event).__name__} led to {state}, expected one of {sorted(targets)}"
        )


def mermaid(table: Table) -> str:
    """The table as a mermaid state diagram; an event that leaves the state as it is, is not drawn."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), targets in table.items():
        for target in sorted(targets):
            if target != state:
                arrows.setdefault((str(state), str(target)), []).append(event.__name__)
    lines = [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in arrows.items()]
    return "\n".join(["stateDiagram-v2", *lines])
