"""The page for people, as it is served at `/`. What a browser makes of it is tested in `test_page_in_browser.py`."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from yarl import URL

import kvberth

pytestmark = pytest.mark.anyio

PARTS = {"main.js": "text/javascript", "page.css": "text/css", "index.html": "text/html"}


async def test_the_page_is_served(site):
    """As HTML, to be asked for again each time, and not to be put into another page."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    async with client.get("/") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = dict(each.split(" ", 1) for each in response.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
        assert (policy["connect-src"], policy["frame-ancestors"]) == ("'self'", "'none'")
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in response.headers["content-security-policy"]


@pytest.mark.parametrize("name", PARTS)
async def test_its_parts_are_served(site, name):
    """Each as what it is, and under the same policy."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    async with client.get(f"/kvberth/page/{name}") as response:
        assert (response.status, response.content_type) == (200, PARTS[name])
        assert "content-security-policy" in response.headers
        assert await response.read() == (resources.files("kvberth.router") / "static" / name).read_bytes()


async def test_what_a_browser_has_is_not_sent_again(site):
    """A tag says which version it has."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    async with client.get("/") as response:
        tag = response.headers["etag"]
    async with client.get("/", if_none_match=f'W/"old", {tag}') as response:
        assert (response.status, await response.read()) == (304, b"")
    async with client.get("/", if_none_match='"old"') as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/kvberth/page/nothing.js", "/kvberth/page/..%2f..%2fapp.py", "/kvberth/page/"])
async def test_it_has_no_other_parts(site, path):
    """What is not one of them is not there, wherever it lies."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    async with client.session.get(URL(client.url + path, encoded=True)) as response:
        assert response.status == 404


async def test_it_needs_no_key(site):
    """It holds nothing; what it asks for needs the admin's."""
    client = await site.router(
        [], [await site.decode()], wait_for="degraded", api_key=("client",), admin_api_key="admin-key"
    )
    for path, status in (("/", 200), ("/kvberth/page/main.js", 200), ("/kvberth/requests", 401)):
        async with client.get(path) as response:
            assert response.status == status


def test_it_is_packaged():
    """All of its files are among the package's data."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["kvberth"]
    package = Path(kvberth.__file__).parent
    shipped = {path for glob in globs for path in package.glob(glob)}
    assert set((package / "router" / "static").iterdir()) <= shipped


def test_it_is_free_of_inline_code():
    """Its policy refuses scripts and styles that are not files of their own, handlers in attributes among them."""
    markup = (resources.files("kvberth.router") / "static" / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", markup)
    assert re.findall(r"<script[^>]*>(.*?)</script>", markup, re.DOTALL) == [""]


def test_everything_it_names_is_there():
    """Its parts name each other by name only: the page works under any path of a proxy, and asks nobody else."""
    folder = resources.files("kvberth.router") / "static"
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    named = {each for text in texts.values() for each in re.findall(r'(?:from "\./|kvberth/page/)([\w.]+)', text)}
    assert named == texts.keys() - {"index.html"}
    said = {each for text in texts.values() for each in re.findall(r"https?://[\w./]+", text)}
    assert {each for each in said if "w3.org" not in each} <= {"http://10.0.0.4"}
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text) for text in texts.values()
    )
