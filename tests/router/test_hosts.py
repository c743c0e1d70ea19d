"""Page and admin API know under which names they are served; clients may call the router whatever they like."""

import pytest

from kvberth.router.hosts import HostNames, is_loopback

from .fakes import COMPLETIONS

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi"}
GUARDED = ["/", "/kvberth/page/main.js", "/kvberth/engines", "/kvberth/requests", "/kvberth/requests/x"]
OPEN = ["/health", "/metrics", "/version", "/v1/models"]
OURS = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:80", "localhost.", "router.localhost:3"]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "10.0.0.1",
    "0.0.0.0",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
]
OTHERS += ["", "127.0.0.1:80:80", "a@localhost", "[::1", "xn--80ak6aa92e", "2130706433"]


async def said(client, path, host, **headers):
    """Status and error code of an answer to a request with this `Host`."""
    async with client.get(path, host=host, **headers) as response:
        body = await response.json() if response.status == 421 else {}
        return response.status, body.get("error", {}).get("code")


@pytest.mark.parametrize("host", OURS)
async def test_names_of_this_machine_are_served(site, host):
    """With any port: what the browser's side of a tunnel is called."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    assert (await said(client, "/", host))[0] == 200
    assert (await said(client, "/kvberth/engines", host))[0] == 200


@pytest.mark.parametrize("host", OTHERS)
async def test_other_names_are_not(site, host):
    """Whatever site a browser believes to be on; the answer says what would be right. The clients' API asks nobody."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    for path in GUARDED:
        assert await said(client, path, host) == (421, "unknown_host")
    for path in OPEN:
        assert (await said(client, path, host))[0] == 200
    async with client.post(PROMPT, COMPLETIONS, host=host) as response:
        assert response.status == 200
    async with client.admin("GET", "/kvberth/engines", host=host) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (421, "unknown_host")
    assert "--allowed-host" in error["message"]


async def test_a_key_is_no_reason_to_be_lax(site):
    """Nor is it needed to be told: a page of another site may not even try one."""
    client = await site.router([], [await site.decode()], wait_for="degraded", admin_api_key="k")
    assert await said(client, "/kvberth/engines", "evil.example", authorization="Bearer k") == (421, "unknown_host")


async def test_further_names_can_be_allowed(site):
    """For a proxy in front that passes on how it was called."""
    client = await site.router(
        [], [await site.decode()], wait_for="degraded", allowed_host=("Router.example",), admin_api_key="k"
    )
    assert (await said(client, "/", "router.example:443"))[0] == 200
    assert (await said(client, "/kvberth/engines", "ROUTER.example", authorization="Bearer k"))[0] == 200
    assert (await said(client, "/", "other.example"))[0] == 421


async def test_a_router_for_everybody_is_called_by_any_name(site):
    """But without a key what it shows is for this machine, and then so are the names."""
    client = await site.router([], [await site.decode()], wait_for="degraded", host="0.0.0.0")
    assert (await said(client, "/", "router.example"))[0] == 200
    assert (await said(client, "/kvberth/engines", "localhost"))[0] == 200
    assert (await said(client, "/kvberth/engines", "router.example"))[0] == 421
    client = await site.router([], [await site.decode()], wait_for="degraded", host="0.0.0.0", admin_api_key="k")
    assert (await said(client, "/kvberth/engines", "router.example", authorization="Bearer k"))[0] == 200


@pytest.mark.parametrize(
    ("bound", "is_local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("a", False)]
)
def test_where_the_names_count(bound, is_local):
    """On the loopback address, which only this machine's programs reach: browsers are among them."""
    assert HostNames(bound, ()).is_local is is_loopback(bound) is is_local
