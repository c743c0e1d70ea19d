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
