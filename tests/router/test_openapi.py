"""The description of the API is the API's."""

import pytest
from starlette.routing import Route

from kvberth.router import RouterConfig, create_app
from kvberth.router.admin import is_view
from kvberth.router.openapi import description

pytestmark = pytest.mark.anyio


def test_every_route_is_described():
    """And nothing else, with its methods. Not the admin API: tools that try what is described would use it."""
    routes = create_app(RouterConfig(prefill=(), decode=("http://d:1",))).routes
    served = {}
    for route in routes:
        assert isinstance(route, Route)
        served[route.path.replace(":path", "")] = {method.lower() for method in route.methods or ()} - {"head"}
    described = {path: set(operations) for path, operations in description(with_keys=False)["paths"].items()}
    assert not any(map(is_view, described))
    assert described == {path: methods for path, methods in served.items() if not is_view(path)}


def test_keys_are_described_where_they_are_needed():
    """Everywhere but at the probes."""
    document = description(with_keys=True)
    assert document["security"] == [{"bearer": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/completions"]["post"]
    assert "security" not in description(with_keys=False)


async def test_it_is_served(site):
    """As JSON."""
    client = await site.router([await site.prefill()], [await site.decode()])
    async with client.get("/openapi.json") as response:
        assert (await response.json())["openapi"] == "3.1.0"
