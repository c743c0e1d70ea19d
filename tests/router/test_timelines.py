"""Requests as operators see them: those in flight, and the last ones that ended."""

import asyncio

import pytest

from kvberth.router import timelines

from .fakes import answers, hangs, until

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
REQUESTS = "/kvberth/requests"


async def ask(client, path=REQUESTS):
    async with client.get(path) as response:
        return await response.json() | {"code": response.status}


async def test_all_that_is_counted_is_shown(site):
    """What is in flight, waits and has ended, by path and status; relayed requests have no timeline and count."""
    decode = await site.decode()
    client = await site.router([], [decode], wait_for="degraded", max_in_flight=1, max_queue=1)
    await client.text(PROMPT)
    await client.text(b"{}", "/tokenize")
    decode.behave = hangs
    asking = [asyncio.ensure_future(client.text(PROMPT)) for _ in range(2)]
    await until(lambda: is_queued(client))
    said = await ask(client)
    counts = {name: said[name] for name in ("in_flight_total", "ended_total", "admitted", "queued", "max_in_flight")}
    assert counts == {"in_flight_total": 2, "ended_total": 1, "admitted": 1, "queued": 1, "max_in_flight": 1}
    assert sorted((each["path"], each["code"], each["requests"]) for each in said["answered"]) == [
        ("relayed", "200", 1),
        ("undivided", "200", 1),
    ]
    for each in asking:
        each.cancel()


async def is_queued(client):
    return (await ask(client))["queued"] == 1


async def test_only_what_is_new_is_asked_for(site):
    """Behind the number that the last answer gave."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    for name in ("first", "second", "third"):
        await client.text(PROMPT, x_request_id=name)
    said = await ask(client)
    assert (said["ended_total"], [each["request_id"] for each in said["recent"]]) == (3, ["third", "second", "first"])
    assert [each["request_id"] for each in (await ask(client, REQUESTS + "?after=1"))["recent"]] == ["third", "second"]
    assert (await ask(client, REQUESTS + "?after=3"))["recent"] == []


async def test_who_has_seen_another_router_is_told_everything(site):
    """Its number is larger than any that this one has given."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    await client.text(PROMPT)
    assert len((await ask(client, REQUESTS + "?after=99"))["recent"]) == 1


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "%C2%B2", "9" * 40])
async def test_a_number_that_is_none_is_refused(site, after):
    """And not taken for zero."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    said = await ask(client, f"{REQUESTS}?after={after}")
    assert (said["code"], said["error"]["code"], said["error"]["param"]) == (400, "invalid_after", "after")


async def test_of_many_the_oldest_are_shown(site, monkeypatch):
    """All are counted; the list stays short enough to be asked for every second."""
    monkeypatch.setattr(timelines, "_LISTED_IN_FLIGHT", 2)
    client = await site.router([], [await site.decode(hangs)], wait_for="degraded")
    asking = []
    for name in ("first", "second", "third"):
        asking.append(asyncio.ensure_future(client.text(PROMPT, x_request_id=name)))
        await until(lambda: number_is(client, len(asking)))
    assert [each["request_id"] for each in (await ask(client))["in_flight"]] == ["first", "second"]
    for each in asking:
        each.cancel()


async def number_is(client, number):
    return (await ask(client))["in_flight_total"] == number


async def test_an_end_says_what_went_wrong(site):
    """In the router's own words where it had to find some; an engine's answer speaks for itself."""
    client = await site.router([], [await site.decode(answers({"error": {}}, 404))], wait_for="degraded")
    await client.text(PROMPT)
    await client.text(PROMPT, x_kvberth_mode="sideways")
    refused, passed_on = [each["events"][-1] for each in (await ask(client))["recent"]]
    assert passed_on["facts"] == {"status": 404}
    assert refused["facts"]["error"] == "invalid_mode"
    assert "sideways" in refused["facts"]["message"]


async def test_it_is_known_whether_an_answer_is_streamed(site):
    """One that comes in one piece shows no first token, and is not late without it."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    await client.text(PROMPT)
    await client.text(PROMPT | {"stream": True})
    streamed, whole = [each["events"][0] for each in (await ask(client))["recent"]]
    assert (streamed["what"], streamed["facts"]["streamed"], whole["facts"]["streamed"]) == ("admitted", True, False)
