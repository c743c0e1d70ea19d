"""Keys: the clients' at the router, the router's at the engines."""

import pytest

from .fakes import COMPLETIONS

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi"}
MESSAGES = "/v1/messages"


async def site_with_keys(site, **settings):
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode], api_key=("one", "two"), **settings)
    return client, prefill, decode


@pytest.mark.parametrize("authorization", ["Bearer one", "Bearer two", "bearer two"])
async def test_a_key_lets_in_and_stays_at_the_router(site, authorization):
    """Any of the keys; engines do not learn it."""
    client, *engines = await site_with_keys(site)
    async with client.post(PROMPT, authorization=authorization) as response:
        assert response.status == 200
    assert all("authorization" not in engine.seen[0].headers for engine in engines)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}])
@pytest.mark.parametrize("x_api_key", ["", "one"])
async def test_without_a_key_nothing_is_served(site, headers, x_api_key):
    """401 in OpenAI's form; Anthropic's header is not for these paths."""
    client, *engines = await site_with_keys(site)
    for send in (
        client.post(PROMPT, **headers, x_api_key=x_api_key),
        client.post(PROMPT, "/tokenize", **headers, x_api_key=x_api_key),
        client.get("/v1/models", **headers),
        client.get("/v1/models/m", **headers),
        client.get("/version", **headers),
        client.get("/openapi.json", **headers),
        client.get("/nothing", **headers),
    ):
        async with send as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
    assert all(engine.seen == [] for engine in engines)


async def test_probes_need_no_key(site):
    """Nor do scrapers."""
    client, *_ = await site_with_keys(site)
    for path in ("/health", "/ping", "/metrics"):
        async with client.get(path) as response:
            assert response.status == 200


@pytest.mark.parametrize("headers", [{"x_api_key": "two"}, {"authorization": "Bearer one"}])
async def test_messages_take_both_headers(site, headers):
    """Anthropic's clients send theirs; it stays at the router too."""
    client, *engines = await site_with_keys(site)
    async with client.post(PROMPT, MESSAGES, **headers) as response:
        assert response.status == 200
    for engine in engines:
        assert not {"authorization", "x-api-key"} & engine.seen[0].headers.keys()


@pytest.mark.parametrize("headers", [{}, {"x_api_key": "three"}])
async def test_messages_refuse_in_their_own_form(site, headers):
    """An Anthropic error."""
    client, *_ = await site_with_keys(site)
    async with client.post(PROMPT, MESSAGES, **headers) as response:
        said = await response.json()
    assert (response.status, said["type"], said["error"]["type"]) == (401, "error", "authentication_error")


@pytest.mark.parametrize("keys", [(), ("one",)])
async def test_engines_get_the_router_s_key(site, keys):
    """On every leg and on what is relayed, instead of the client's, whether or not that one is checked."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode], api_key=keys, engine_api_key="inner")
    for path in (COMPLETIONS, "/tokenize"):
        async with client.post(PROMPT, path, authorization="Bearer one", x_api_key="one") as response:
            assert response.status == 200
    for seen in prefill.seen + decode.seen:
        assert seen.headers["authorization"] == "Bearer inner"
        assert "x-api-key" not in seen.headers
    assert (len(prefill.seen), len(decode.seen)) == (1, 2)


async def test_the_admin_api_has_a_key_of_its_own(site):
    """A client's key does not open it, and who has the admin key needs no other; it opens nothing else."""
    client, *_ = await site_with_keys(site, admin_api_key="admin")
    for path in ("/kvberth/engines", "/kvberth/engines/drain"):
        async with client.admin("POST", path, authorization="Bearer one") as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (401, "invalid_admin_key")
    async with client.get("/kvberth/engines", authorization="Bearer admin") as response:
        assert response.status == 200
        assert len((await response.json())["engines"]) == 2
    for send in (
        client.post(PROMPT, authorization="Bearer admin"),
        client.get("/kvberth/nothing", authorization="Bearer admin"),
    ):
        async with send as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("authorization", ["Bearer one", ""])
async def test_clients_keys_change_nothing_for_an_admin_api_without_a_key(site, authorization):
    """It answers to programs on this machine, with or without one, and to nobody else."""
    client, *_ = await site_with_keys(site)
    async with client.get("/kvberth/engines", authorization=authorization) as response:
        assert response.status == 200
    async with client.get("/kvberth/engines", authorization=authorization, x_forwarded_for="10.0.0.1") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "admin_is_local")


async def test_engines_are_watched_with_the_router_s_key(site, tmp_path):
    """Their health, role and load, whoever named them."""
    load = {"num_requests_running": "3", "num_requests_waiting": "2", "kv_cache_usage_perc": "0.25"}
    engines = [await site.decode(key="inner", engine_id=name, load=load) for name in ("settings", "file", "api")]
    by_setting, in_file, added = engines
    (tmp_path / "engines").write_text(in_file.url)
    client = await site.router(
        engines=(by_setting.url,),
        engines_file=str(tmp_path / "engines"),
        engine_api_key="inner",
        wait_for="degraded",
    )
    async with client.admin("POST", "/kvberth/engines", {"url": added.url}) as response:
        assert response.status == 201
    for engine in engines:
        await client.until_engine(engine, ready=True, role="decode")
        assert (await client.engine(engine))["load"]["running"] == 3
    client = await site.router([], [by_setting], engine_api_key="wrong", wait_for="unavailable")
    await client.until_problem("/health answered 401")
