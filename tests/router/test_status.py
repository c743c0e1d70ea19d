"""Health, discovery, models, and what else is asked of a server."""

import pytest

from kvberth import __version__

pytestmark = pytest.mark.anyio


async def test_health_is_ok_with_both_roles(site):
    """And it shows who is there."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    well = {"ready": True, "in_flight": 0, "problem": None, "draining": False, "breaker": "closed"}
    assert await client.health() == {
        "code": 200,
        "status": "ok",
        "prefill": [{"url": prefill.url, "engine_id": "p", **well}],
        "decode": [{"url": decode.url, "engine_id": "d", **well}],
        "unknown": [],
    }
    assert await client.metric(f'kvberth_router_engine_up{{engine="{prefill.url}",role="prefill"}}') == 1


async def test_an_engine_in_the_wrong_role_is_named(site):
    """Two swapped URLs are an operator's mistake that must be told, not served."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([decode], [prefill], wait_for="unavailable")
    health = await client.health()
    assert health["code"] == 503
    assert "is a kv_consumer, but is configured as a kv_producer" in health["prefill"][0]["problem"]
    assert "is a kv_producer, but is configured as a kv_consumer" in health["decode"][0]["problem"]
    assert await client.metric(f'kvberth_router_engine_up{{engine="{prefill.url}",role="decode"}}') == 0


async def test_the_router_may_start_first(site):
    """Engines are waited for, and what they say of themselves too."""
    decode = await site.decode(is_healthy=False, says_who_it_is=False)
    client = await site.router([await site.prefill()], [decode], wait_for="unavailable")
    assert "503" in (await client.health())["decode"][0]["problem"]
    decode.is_healthy = True
    await client.until_problem("KVBerthConnector")
    decode.says_who_it_is = True
    await client.until_healthy("ok")


async def test_models_come_from_decode(site):
    """And from a prefill worker if there is no other."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    async with client.get("/v1/models") as response:
        assert (await response.json())["data"] == [{"id": "d"}]
        assert response.headers["x-request-id"]
    decode.is_healthy = False
    await client.until_healthy("unavailable")
    async with client.get("/v1/models") as response:
        assert (await response.json())["data"] == [{"id": "p"}]
    prefill.is_healthy = False
    await client.until_problem("503", role="prefill")
    async with client.get("/v1/models") as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "no_engine"


async def test_small_endpoints(site):
    """Version and ping; unknown paths and methods are errors in OpenAI's form."""
    client = await site.router([await site.prefill()], [await site.decode()])
    async with client.get("/version") as response:
        assert await response.json() == {"version": __version__}
    async with client.get("/ping") as response:
        assert response.status == 200
    for path, status, code in [("/v1/nothing", 404, "not_found"), ("/v1/completions", 405, "method_not_allowed")]:
        async with client.get(path) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == code
            assert response.headers["x-request-id"]
