"""What is left of a request that is over."""

import gc

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
