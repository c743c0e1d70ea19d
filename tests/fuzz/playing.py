"""Which targets there are, what each begins with, and how inputs are changed and played."""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tests.fuzz import protocol_target, request_target, trace_target

__all__ = ["MOST_BYTES", "TARGETS", "Target", "inputs_of", "play", "vary"]

_CORPUS = Path(__file__).with_name("corpus")
MOST_BYTES = 8 * 1024
_POOL = 400


class Target(Protocol):
    """A module: what is fuzzed, how an input is changed, and with which ones to begin."""

    run: Callable[[bytes], None]
    changed: Callable[[bytes, Sequence[bytes], random.Random], bytes]
    seeds: Callable[[], list[bytes]]


TARGETS: dict[str, Target] = {"protocol": protocol_target, "traces": trace_target, "requests": request_target}


def inputs_of(name: str) -> list[bytes]:
    """The seeds, and what is kept in `corpus/` since it has once broken something or reached what seeds do not."""
    kept = sorted((_CORPUS / name).glob("*"))
    return [*TARGETS[name].seeds(), *(path.read_bytes() for path in kept)]


def vary(target: Target, data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """The input with a few changes."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = target.changed(data, others, draw)[:MOST_BYTES]
    return data


def play(name: str, runs: int, draw: random.Random, folder: Path | None = None) -> None:
    """Play so many changed inputs. What breaks something is written to the folder, and raised."""
    target = TARGETS[name]
    seeds = inputs_of(name)
    pool: list[bytes] = []
    for _ in range(runs):
        data = vary(target, draw.choice((draw.choice(seeds), draw.choice(pool or seeds))), seeds, draw)
        try:
            target.run(data)
        except BaseException as error:
            if folder is not None:
                crash = folder / f"crash-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"
                crash.write_bytes(data)
                error.add_note(f"The input is {crash}.")
            else:
                error.add_note(f"The input is {data!r}.")
            raise
        # Nothing guides it, but changes of changed inputs go further than those of the first ones.
        if len(pool) < _POOL:
            pool.append(data)
        else:
            pool[draw.randrange(_POOL)] = data
