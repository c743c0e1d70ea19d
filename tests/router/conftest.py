"""What the router's tests share."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from .fakes import Site


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(stack)
