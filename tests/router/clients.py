"""What the tests of real clients share."""

from collections.abc import AsyncIterable
from typing import Any

from .fakes import Behaviour, Client, FakeEngine, until


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Do something else with each request, and the last of these from then on."""
    left = list(behaviours)

    async def behave(seen, send):
        await (left.pop(0) if len(left) > 1 else left[0])(seen, send)

    return behave


async def collect(items: AsyncIterable[Any], into: list[Any]) -> None:
    """Keeps what has come until an exception."""
    async for each in items:
        into.append(each)


def retry_counts(engine: FakeEngine) -> list[str]:
    """The numbers that the client gives its tries of one request, of those that have come to the engine."""
    return [seen.headers["x-stainless-retry-count"] for seen in engine.seen]


async def refused(router: Client, status: int) -> None:
    """Until the router has answered somebody with this status."""

    async def has_refused() -> bool:
        async with router.get("/metrics") as response:
            return f'kvberth_router_requests_total{{code="{status}"' in await response.text()

    await until(has_refused)
