"""What is left of a request that is over."""

import gc
import subprocess
import sys

import pytest

from kvberth.router.engine_connection import Ask
from kvberth.router.exchange import Exchange
from kvberth.router.legs import DecodeLeg, PrefillLeg
from kvberth.router.life import Life

from .fakes import answers, streams, until

PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 14579}
KINDS = (Exchange, Life, PrefillLeg, DecodeLeg, Ask)


def number_alive() -> int:
    return sum(type(each) in KINDS for each in gc.get_objects())  # `isinstance` wakes lazy modules


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_nothing_of_a_request_waits_for_the_collector(site, mode, is_streamed):
    """Its pauses stop all streams: with what hundreds of requests a second would leave, for a tenth of a second."""
    chunks = [b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n"]
    prefill = await site.prefill(answers({"kv_transfer_params": PARAMS}))
    decode = await site.decode(streams(*chunks) if is_streamed else answers({"choices": [{"text": "a"}]}))
    client = await site.router([prefill], [decode])
    body = {"prompt": "A", "max_tokens": 1, "stream": is_streamed}
    gc.collect()
    before = number_alive()  # of other tests
    gc.disable()
    try:
        for _ in range(5):
            async with client.post(body, x_kvberth_mode=mode) as response:
                assert response.status == 200
                await response.read()
        await until(lambda: number_alive() <= before)
    finally:
        gc.enable()


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
