"""What a real browser makes of the report."""

import asyncio

import pytest
from tests.compare.conftest import fill, manifest, settings
from tests.router.browser import DESKTOP, PHONE, chromium, needs_chromium

from kvberth.compare import Folder, load

pytest.importorskip("matplotlib", reason="the report's plots need it")

from kvberth.compare.report import to_html

pytestmark = needs_chromium

WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
COLOURS = "(() => { const of = getComputedStyle(document.body); return [of.color, of.backgroundColor]; })()"
CURVE = "getComputedStyle(document.querySelector('svg path[style*=\"--m0\"]')).stroke"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    """The report of a comparison with two rates and two modes."""
    folder = Folder(tmp_path_factory.mktemp("results"))
    folder.create(manifest(settings()))
    fill(folder, settings())
    path = folder.path / "report.html"
    path.write_text(to_html(load(folder), folder.measured()))
    return path


def look(page_path, **context):
    """What the page says of itself with these settings of the browser."""

    async def opened():
        async with chromium() as browsing, browsing(**context) as page:
            await page.goto(page_path.as_uri())
            verdict = await page.locator("h1").bounding_box()
            return {
                "widths": await page.evaluate(WIDTHS),
                "colours": await page.evaluate(COLOURS),
                "curve": await page.evaluate(CURVE),
                "verdict_ends": verdict["y"] + verdict["height"],
            }

    return asyncio.run(opened())


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
def test_it_fits_the_screen_and_begins_with_the_verdict(page_path, viewport):
    """Wide tables scroll by themselves, and not the page; nobody scrolls for the verdict."""
    seen = look(page_path, viewport=viewport)
    width, available = seen["widths"]
    assert width <= available
    assert seen["verdict_ends"] < viewport["height"]


def test_plots_and_text_follow_the_theme(page_path):
    """Light and dark, each with colours of its own."""
    light, dark = (look(page_path, color_scheme=scheme) for scheme in ("light", "dark"))
    assert light["colours"] != dark["colours"]
    assert light["curve"] != dark["curve"]
