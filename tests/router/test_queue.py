"""The waiting room before the router's limit."""

import asyncio

import pytest

from .fakes import D_ANSWER, answers, until

pytestmark = pytest.mark.anyio

QUEUED = "kvberth_router_queued"


def prompt(name):
    return {"model": "m", "prompt": name}


async def busy_site(site, **settings):
    """A router whose only place is taken until `may_end` is set."""
    may_end = asyncio.Event()
    decode = await site.decode(answers(D_ANSWER, after=may_end))
    client = await site.router([], [decode], wait_for="degraded", max_in_flight=1, **settings)
    first = asyncio.ensure_future(client.text(prompt("first")))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
    return client, decode, may_end, first


async def waiting(client, name):
    """A request that is in the queue when this returns."""
    before = await client.metric(QUEUED)
    task = asyncio.ensure_future(client.text(prompt(name)))
    await until(lambda: is_queued(client, before + 1))
    return task


async def is_queued(client, number):
    return await client.metric(QUEUED) == number


async def test_requests_wait_for_their_turn_in_order(site):
    """What is above the limit is served when there is room, first come first served; the wait is measured."""
    client, decode, may_end, first = await busy_site(site, max_queue=3)
    tasks = [await waiting(client, name) for name in ("second", "third", "fourth")]
    assert len(decode.seen) == 1
    may_end.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, *tasks)
    assert [seen.json["prompt"] for seen in decode.seen] == ["first", "second", "third", "fourth"]
    assert await client.metric(QUEUED) == 0
    assert await client.total("kvberth_router_admission_wait_seconds_count") == 4
    assert await client.total("kvberth_router_admission_wait_seconds_sum") > 0


async def test_a_full_queue_turns_away(site):
    """429 with a time to come again."""
    client, _, may_end, first = await busy_site(site, max_queue=1)
    second = await waiting(client, "second")
    async with client.post(prompt("third")) as response:
        assert response.status == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
    may_end.set()
    await asyncio.gather(first, second)


async def test_who_leaves_the_queue_is_not_served(site):
    """Its place is free at once, and no engine hears of it."""
    client, decode, may_end, first = await busy_site(site, max_queue=1)
    second = await waiting(client, "second")
    second.cancel()
    await until(lambda: is_queued(client, 0))
    third = await waiting(client, "third")
    may_end.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, third)
    assert [seen.json["prompt"] for seen in decode.seen] == ["first", "third"]
    assert await client.total("kvberth_router_client_disconnects_total", path="none", phase="queue") == 1


async def test_a_wait_that_is_too_long_ends(site):
    """429 again: to come later is what helps."""
    client, decode, may_end, first = await busy_site(site, max_queue=1, queue_timeout_seconds=0.05)
    async with client.post(prompt("second")) as response:
        assert response.status == 429
        assert "waited" in (await response.json())["error"]["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
    may_end.set()
    await first
    assert len(decode.seen) == 1


async def test_a_deadline_in_the_queue_is_the_queue_s(site):
    """504, not charged to a leg that never ran."""
    client, _, may_end, first = await busy_site(site, max_queue=1)
    async with client.post(prompt("second"), x_kvberth_timeout_seconds="0.05") as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "queue_timeout"
    may_end.set()
    await first
    await client.until_idle()


async def test_a_bad_request_in_the_queue_gives_its_place_back(site):
    """A body that is refused while it waits is refused at once."""
    client, _, may_end, first = await busy_site(site, max_queue=1, max_body_bytes=1000)
    async with client.post(prompt("x" * 2000)) as response:
        assert response.status == 413
    assert await client.metric(QUEUED) == 0
    may_end.set()
    await first


async def test_the_time_in_the_queue_is_not_an_engine_s(site):
    """Who waits is in flight nowhere, and the rate measured with it later is that of the prefill worker alone."""
    may_end = asyncio.Event()
    prefill, decode = await site.prefill(), await site.decode(answers(D_ANSWER, after=may_end))
    client = await site.router([prefill], [decode], mode="pull", max_in_flight=1, max_queue=1)
    first = asyncio.ensure_future(client.text({"prompt": [1]}))
    await client.until_engine(decode, in_flight=1)
    second = asyncio.ensure_future(client.text({"prompt": [1] * 10_000}))
    await until(lambda: is_queued(client, 1))
    await asyncio.sleep(0.5)
    waiting_for = await client.engine(prefill)
    assert (waiting_for["in_flight"], waiting_for["prompt_tokens_in_flight"]) == (0, 0)
    may_end.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, second)
    assert await client.total("kvberth_router_admission_wait_seconds_sum") >= 0.5
    assert (await client.engine(prefill))["prefill_tokens_per_second"] > 10_000 / 0.5
