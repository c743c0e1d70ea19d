"""Keeps what the router believes of its engines true: one task per engine asks for its health and learns who it is."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp

from kvberth.router.engines import Engine, parse_engine_info

__all__ = ["watched"]

logger = logging.getLogger(__name__)

# An engine under full load answers /health late, because its HTTP server tokenizes prompts on the same loop.
_PATIENCE_SECONDS = 5.0


@asynccontextmanager
async def watched(
    session: aiohttp.ClientSession, engines: list[Engine], interval_seconds: float
) -> AsyncIterator[None]:
    """Watch `engines` for as long as the context is open. Engines that are not up yet are waited for."""
    tasks = [
        asyncio.create_task(_watch(session, engine, interval_seconds), name=f"watch {engine.url}") for engine in engines
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(session: aiohttp.ClientSession, engine: Engine, interval_seconds: float) -> None:
    told: str | None = ""
    doubted = asyncio.Event()
    engine.on_unready = doubted.set
    while True:
        await _look(session, engine)
        doubted.clear()
        if engine.problem != told:
            told = engine.problem
            if told is None:
                logger.info("%s %s is ready", engine.role.name.lower(), engine.url)
            else:
                logger.warning("%s %s is not ready: %s", engine.role.name.lower(), engine.url, told)
        # A request that failed is reason to look at once: one broken connection should not cost the engine a second.
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_seconds):
                await doubted.wait()


async def _look(session: aiohttp.ClientSession, engine: Engine) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            async with session.get(f"{engine.url}/health") as response:
                if response.status != 200:
                    engine.mark_unready(f"/health answered {response.status}")
                    return
            if not engine.is_ready:
                engine.mark_ready(parse_engine_info(await _metrics_text(session, engine), engine.role))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        engine.mark_unready(str(error) or f"gave no answer within {_PATIENCE_SECONDS:g} s")


async def _metrics_text(session: aiohttp.ClientSession, engine: Engine) -> str:
    async with session.get(f"{engine.url}/metrics") as response:
        if response.status != 200:
            raise ValueError(f"/metrics answered {response.status}")
        return await response.text()
