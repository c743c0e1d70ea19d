"""Which engines the router has: those of its settings, of the engines file, and what the admin API added.

An engine of the fleet has a task that watches it, and a forgotten one has none: here is where the two are kept in step.
"""

import asyncio
import logging
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvberth.router.breaker import BreakerState
from kvberth.router.engines import Engine, Role, Source
from kvberth.router.engines_file import EnginesFileError, NamedEngine, read_engines_file
from kvberth.router.fleet import Fleet
from kvberth.router.watch import Watch

__all__ = ["RoleConflictError", "Roster", "log_breaker", "rereading"]

logger = logging.getLogger(__name__)


class RoleConflictError(ValueError):
    """An engine is known, and said to be in another role."""


class Roster:
    """Engines come, drain and go. For the event loop's thread; `watch.forget` is to be the fleet's `on_forgotten`."""

    def __init__(self, fleet: Fleet, watch: Watch) -> None:
        self._fleet = fleet
        self._watch = watch

    def add(self, url: str, role: Role | None, source: Source) -> Engine:
        """Have this engine from now on; one that was leaving stays, one that is there already remains as it is.

        Raises `RoleConflictError` if it is there and `role` is not the one that was asserted of it, or that it has.
        """
        engine = self._fleet.find(url)
        if engine is None:
            engine = self._fleet.add(url, role, source)
            self._watch.follow(engine)
            logger.info("engine %s is added", url)
        elif engine.is_leaving:
            self._fleet.keep(engine)
            engine.source = source
            _assert_role(engine, role)
        elif role is not None and role is not (engine.asserted_role or engine.role):
            raise RoleConflictError(f"{url} is known already, and not as a {role.word} worker")
        return engine

    def drain(self, engine: Engine) -> None:
        """Send nothing new to this engine; what it has goes on."""
        logger.info("engine %s is drained; %d requests are in flight there", engine.url, engine.in_flight)
        engine.is_draining = True

    def resume(self, engine: Engine) -> None:
        """Take back a `drain`, or a `remove` that is not complete yet."""
        logger.info("engine %s is in use again", engine.url)
        self._fleet.keep(engine)
        engine.is_draining = False

    def remove(self, engine: Engine) -> None:
        """Drain this engine, and forget it when its last request has ended."""
        if not engine.is_leaving:
            logger.info("engine %s is removed; %d requests are in flight there", engine.url, engine.in_flight)
            self._fleet.remove(engine)

    def apply(self, named: Iterable[NamedEngine]) -> None:
        """Make the engines of the file those that it names now. Who was named elsewhere too is left alone."""
        wanted = {each.url: each.role for each in named}
        for engine in self._fleet.engines:
            if engine.source is Source.FILE and engine.url not in wanted:
                self.remove(engine)
        for url, role in wanted.items():
            engine_or_none = self._fleet.find(url)
            if engine_or_none is None or engine_or_none.is_leaving:
                self.add(url, role, Source.FILE)
            elif engine_or_none.source is Source.FILE:
                _assert_role(engine_or_none, role)

    def reread(self, path: Path) -> None:
        """Read the engines file again. One that cannot be used changes nothing."""
        try:
            named = read_engines_file(path)
        except EnginesFileError as error:
            logger.error("the engines stay as they are: %s", error)  # noqa: TRY400 - the line says all
            return
        self.apply(named)
        logger.info("%s names %d engines", path, len(named))


@contextmanager
def rereading(roster: Roster, path: Path | None) -> Iterator[None]:
    """Read the engines file again on each SIGHUP, for as long as the context is open. For the main thread's loop."""
    if path is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, roster.reread, path)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def log_breaker(engine: Engine) -> None:
    """Tell operators of a breaker that has changed its state."""
    match engine.breaker.state:
        case BreakerState.OPEN:
            logger.warning("%s failed %d times in a row: no requests for now", engine.url, engine.breaker.failures)
        case BreakerState.HALF_OPEN:
            logger.info("%s gets one request, to see whether it is well again", engine.url)
        case BreakerState.CLOSED:
            logger.info("%s is well again", engine.url)


def _assert_role(engine: Engine, role: Role | None) -> None:
    if role is engine.asserted_role:
        return
    engine.asserted_role = role
    if role not in (None, engine.role):
        engine.role = role
        engine.mark_unready("not heard from yet in its new role")  # the watch looks at once
