"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright."""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 375, "height": 720}

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: on Debian, apt-get install chromium")


Browsing = Callable[..., AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browsing]:
    """A browser; what it gives opens an empty page without memory, with these settings of Playwright's contexts.

    What the page complains of fails the test.
    """
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))

        @asynccontextmanager
        async def browsing(**settings: Any) -> AsyncIterator[Any]:
            async with await browser.new_context(**({"viewport": DESKTOP} | settings)) as context:
                page = await context.new_page()
                page.set_default_timeout(10_000)
                complaints: list[str] = []
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.on("console", lambda said: complaints.append(said.text) if is_complaint(said) else None)
                yield page
                assert complaints == []

        try:
            yield browsing
        finally:
            await browser.close()


def is_complaint(said: Any) -> bool:
    """What the page's policy refuses and scripts that fail; not the answers with an error that the page handles."""
    return said.type == "error" and "Failed to load resource" not in said.text
