"""Keeps what the router believes of its engines true: one task per engine asks for its health, role and load."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlencode

from kvberth.router.engine_client import EngineClient
from kvberth.router.engine_connection import HttpError
from kvberth.router.engines import Engine, parse_engine_info
from kvberth.router.load import LOAD_METRICS, parse_load

__all__ = ["Watch", "watching"]

logger = logging.getLogger(__name__)

# An engine under full load answers /health late, because its HTTP server tokenizes prompts on the same loop.
_PATIENCE_SECONDS = 5.0
# What a fresh reading for a choice may cost a request, and how old one may be that is fresh still.
_REFRESH_SECONDS = 0.05
_FRESH_SECONDS = 0.05
# A reading older than this says nothing of now: the engine then counts as one whose load is not known.
_STALE_SECONDS = 10.0
_LOAD_QUERY = urlencode([("name[]", name) for name in LOAD_METRICS])


class Watch:
    """The tasks that watch engines. An engine that is not up yet is waited for."""

    def __init__(self, client: EngineClient, interval_seconds: float) -> None:
        self._client = client
        self._interval_seconds = interval_seconds
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._readings: dict[Engine, asyncio.Task[None]] = {}

    def follow(self, engine: Engine) -> None:
        """Watch this engine from now on, until `forget`."""
        watching = _watch(self._client, engine, self._interval_seconds)
        self._tasks[engine] = asyncio.create_task(watching, name=f"watch {engine.url}")

    def forget(self, engine: Engine) -> None:
        """End its task. One that is not followed (any more) is nothing to forget: requests may outlive the watch."""
        engine.on_unready = None
        if task := self._tasks.pop(engine, None):
            task.cancel()

    async def refresh(self, engines: Iterable[Engine]) -> None:
        """Read the loads of these engines anew, for a choice among them that is made now.

        Waits for no more than 50 ms: what has not come by then comes later. Requests that want the same share one
        reading.
        """
        if readings := self.begin_refresh(engines):
            await asyncio.wait(readings, timeout=_REFRESH_SECONDS)

    def begin_refresh(self, engines: Iterable[Engine]) -> list[asyncio.Task[None]]:
        """The same for a choice that is made soon."""
        now = time.monotonic()
        candidates = [engine for engine in engines if engine.is_ready]
        if len(candidates) < 2:
            return []
        return [
            self._reading(engine)
            for engine in candidates
            if engine.load is None or now - engine.load.read_at > _FRESH_SECONDS
        ]

    def _reading(self, engine: Engine) -> asyncio.Task[None]:
        task = self._readings.get(engine)
        if task is None:
            task = asyncio.create_task(_read_load(self._client, engine), name=f"load {engine.url}")
            self._readings[engine] = task
            task.add_done_callback(lambda _: self._readings.pop(engine))
        return task

    async def close(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks.values(), *self._readings.values()]
        for task in tasks:
            task.cancel()
        for engine in list(self._tasks):
            self.forget(engine)
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def watching(client: EngineClient, interval_seconds: float) -> AsyncIterator[Watch]:
    """A watch for as long as the context is open."""
    watch = Watch(client, interval_seconds)
    try:
        yield watch
    finally:
        await watch.close()


async def _watch(client: EngineClient, engine: Engine, interval_seconds: float) -> None:
    told: tuple[str | None, str | None] | None = None
    doubted = asyncio.Event()
    engine.on_unready = doubted.set
    while True:
        await _look(client, engine)
        doubted.clear()
        name = engine.role.word if engine.role else "engine"
        if (name, engine.problem) != told:
            told = (name, engine.problem)
            if engine.problem is None:
                logger.info("%s %s is ready", name, engine.url)
            else:
                logger.warning("%s %s is not ready: %s", name, engine.url, engine.problem)
        # A request that failed is reason to look at once: one broken connection should not cost the engine a second.
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_seconds):
                await doubted.wait()


async def _look(client: EngineClient, engine: Engine) -> None:
    if not await _is_well(client, engine, time.monotonic()):
        return
    # Of an engine that is in service silence is found out by the question after its health, so that leaves time for it.
    patience = _PATIENCE_SECONDS / 2 if engine.is_ready else _PATIENCE_SECONDS
    read_at, held = time.monotonic(), engine.held
    try:
        async with asyncio.timeout(patience):
            text = await _metrics_text(client, engine, "/metrics")
    except (HttpError, TimeoutError, ValueError) as error:
        if engine.is_ready:
            # It is healthy and has said who it is: that its load cannot be read is no reason to do without it.
            _forget_stale_load(engine)
            if isinstance(error, TimeoutError):
                await _is_well(client, engine, time.monotonic() - patience)
        else:
            engine.mark_unready(_why(error))
        return
    try:
        # Asked each time, because an engine can be restarted in another role between two looks.
        engine.mark_ready(parse_engine_info(text, engine.asserted_role))
    except ValueError as error:
        engine.mark_unready(str(error))
        return
    try:
        engine.take_load(parse_load(text, read_at=read_at, held=held))
    except ValueError:
        _forget_stale_load(engine)


async def _is_well(client: EngineClient, engine: Engine, asked_at: float) -> bool:
    """Ask for its health, again and again while pieces of answers come: it is busy then.

    It is silent when nothing at all has come for so long, since it was first asked (`asked_at`) or after that; who
    refuses connections, when nothing has come from those that it had.
    """
    while (left := max(asked_at, engine.heard_at) + _PATIENCE_SECONDS - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                answer = await client.fetch("GET", engine.url, "/health")
        except TimeoutError:
            continue
        except HttpError as error:
            if engine.heard_at + _PATIENCE_SECONDS < time.monotonic():
                # vLLM that is told to end takes requests until its listener is closed, and may never answer the last.
                engine.mark_silent(_why(error))
            else:
                engine.mark_unready(_why(error))
            return False
        engine.heard_at = time.monotonic()
        if answer.status != 200:
            engine.mark_unready(f"/health answered {answer.status}")
        return answer.status == 200
    engine.mark_silent(f"gave no answer within {_PATIENCE_SECONDS:g} s")
    return False


async def _read_load(client: EngineClient, engine: Engine) -> None:
    """The load alone, of an engine that is known to be well: a fraction of the whole page's cost.

    vLLM has two pages of metrics: the one without a slash behind its name shows always all.
    """
    read_at, held = time.monotonic(), engine.held
    with suppress(HttpError, TimeoutError, ValueError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            text = await _metrics_text(client, engine, f"/metrics/?{_LOAD_QUERY}")
        load = parse_load(text, read_at=read_at, held=held)
        if engine.is_ready:  # if it has gone meanwhile, this is the load of what may be another engine when it is back
            engine.take_load(load)


def _forget_stale_load(engine: Engine) -> None:
    if engine.load is not None and time.monotonic() - engine.load.read_at > _STALE_SECONDS:
        engine.load = None


def _why(error: Exception) -> str:
    return str(error) or f"gave no answer within {_PATIENCE_SECONDS:g} s"


async def _metrics_text(client: EngineClient, engine: Engine, target: str) -> str:
    answer = await client.fetch("GET", engine.url, target)
    if answer.status != 200:
        raise ValueError(f"/metrics answered {answer.status}")
    return answer.body.decode()
