"""What is left of a request that is over."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from kvberth.router.engine_connection import Ask, Connection
from kvberth.router.exchange import Exchange
from kvberth.router.legs import DecodeLeg, PrefillLeg
from kvberth.router.life import Life
from kvberth.router.proxy import _Generation
from kvberth.router.server import _Connection

from .fakes import answers, dies, half_answer, hangs, streams, until

PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 14579}
KINDS = (_Generation, Exchange, Life, PrefillLeg, DecodeLeg, Ask, Connection, _Connection)
CHUNKS = [b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n"]
PREFILLED = answers({"kv_transfer_params": PARAMS})
ENDS = {
    "the client leaves before a token": (PREFILLED, hangs),
    "the client leaves in the prefill": (hangs, hangs),
    "the client leaves in mid-stream": (PREFILLED, streams(CHUNKS[0], then=hangs)),
    "the deadline comes": (PREFILLED, hangs),
    "the prefill worker dies": (dies, answers({"choices": [{"text": "a"}]})),
    "the decode worker dies": (PREFILLED, dies),
    "the stream breaks": (PREFILLED, streams(CHUNKS[0], then=dies)),
    "the answer breaks": (PREFILLED, half_answer(b'{"choices":')),
    "the decode worker fails": (PREFILLED, answers({}, status=500)),
    "the request is wrong": (PREFILLED, hangs),
}


def number_alive() -> int:
    """Connections that stand do not count: they wait for the next request."""
    found = [each for each in gc.get_objects() if type(each) in KINDS]  # `isinstance` wakes lazy modules
    return sum(not isinstance(each, Connection | _Connection) or each.transport.is_closing() for each in found)


async def leaves_nothing(ask: Callable[[], Awaitable[None]]) -> None:
    """Five requests, without the collector."""
    gc.collect()
    before = number_alive()  # of other tests
    gc.disable()
    try:
        for _ in range(5):
            await ask()
        await until(lambda: number_alive() <= before)
    finally:
        gc.enable()


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_nothing_of_a_request_waits_for_the_collector(site, mode, is_streamed):
    """Its pauses stop all streams: with what hundreds of requests a second would leave, for a tenth of a second."""
    prefill = await site.prefill(PREFILLED)
    decode = await site.decode(streams(*CHUNKS) if is_streamed else answers({"choices": [{"text": "a"}]}))
    client = await site.router([prefill], [decode])
    body = {"prompt": "A", "max_tokens": 1, "stream": is_streamed}

    async def ask() -> None:
        async with client.post(body, x_kvberth_mode=mode) as response:
            assert response.status == 200
            await response.read()

    await leaves_nothing(ask)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_nothing_of_a_request_that_ends_badly_waits_for_the_collector(site, mode, is_streamed, end):
    """Their bodies would fill the memory: the collector comes for everything after a million objects."""
    behave_p, behave_d = ENDS[end]
    prefill, decode = await site.prefill(behave_p), await site.decode(behave_d)
    client = await site.router([prefill], [decode], max_retries=1)
    body = {"prompt": "A", "max_tokens": 1, "stream": is_streamed}
    headers = {"x_kvberth_mode": mode if end != "the request is wrong" else "sideways"}
    if end == "the deadline comes":
        headers["x_kvberth_timeout_seconds"] = "0.1"

    async def ask() -> None:
        try:
            async with (
                asyncio.timeout(0.15 if "client leaves" in end else 10),
                client.post(body, **headers) as response,
            ):
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    await ask()
    await client.until_idle()
    await leaves_nothing(ask)


LOADED = """
import gc
from kvberth.router.server import _spare_streams_the_collector

full = []
gc.callbacks.append(lambda phase, info: full.append(info) if phase == "stop" and info["generation"] == 2 else None)
_spare_streams_the_collector()
full.clear()
alive = [[] for _ in range(500_000)]
print(len(full), end=" ")

class Node:
    pass

most = 0
for _ in range(30):
    nodes = [Node() for _ in range(100_000)]
    for node in nodes:
        node.itself = node
    del node, nodes  # old by now, so that only a look at everything finds them
    most = max(most, sum(type(each) is Node for each in gc.get_objects()))
print(len(full) > 0, most < 1_500_000)
"""


def test_everything_is_looked_at_where_much_could_be_garbage_and_not_before():
    """Half a million objects that live cost streams no pause; circles are found before they are three millions."""
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["0", "True", "True"], run.stderr
