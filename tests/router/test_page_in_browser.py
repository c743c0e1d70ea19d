"""What a real browser makes of the page for people. All tests here share one event loop, and with it one browser."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvberth.router import RouterConfig, create_app

from .browser import PHONE, Browsing, chromium, needs_chromium
from .fakes import D_ANSWER, answers, dies, hangs, listening, streams, streams_on, until

pytestmark = [pytest.mark.anyio, needs_chromium]

PICTURES = Path(__file__).parents[2] / "build"
PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
STREAMED = PROMPT | {"stream": True}
EVENT = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><b>bold</b>"


def script(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def browsing(anyio_backend: str) -> AsyncIterator[Browsing]:
    async with chromium() as browsing:
        yield browsing


async def test_it_shows_engines(site, browsing):
    """Each with its role, its state and its load; the verdict stands on top."""
    load = {"num_requests_running": "7", "num_requests_waiting": "2", "kv_cache_usage_perc": "0.625"}
    client = await site.router([await site.prefill(load=load)], [await site.decode(engine_id="decode-7", load=load)])
    async with browsing() as page:
        await page.goto(client.url)
        row = page.locator(".engine[data-role=decode]")
        await row.get_by_text("decode-7").wait_for()
        cells = await row.get_by_role("cell").all_inner_texts()
        assert "ready" in cells[1]
        assert cells[2:4] == ["7", "2"]
        assert cells[4].startswith("63%") or cells[4].startswith("62%")
        assert await page.locator("#verdict b").inner_text() == "Serving"
        assert not await page.locator("#attention-section").is_visible()


async def test_it_says_which_engine_is_down_and_why(site, browsing):
    """Above everything else, without being asked."""
    prefill = await site.prefill()
    client = await site.router([prefill], [await site.decode()])
    async with browsing() as page:
        await page.goto(client.url)
        await page.get_by_text("Serving").wait_for()
        prefill.is_healthy = False
        await page.locator("#attention").get_by_text(f"{prefill.url} is down").wait_for()
        assert "/health answered 503" in await page.locator("#attention").inner_text()
        assert await page.locator("#verdict b").inner_text() == "Degraded"
        assert await page.title() == "Degraded: kvberth router"


async def test_a_request_moves_from_in_flight_to_recent(site, browsing):
    """Within a second or two, with its phases, path and binding."""
    more = asyncio.Event()
    decode = await site.decode(streams(EVENT, then=streams_on(EVENT, DONE, after=more)))
    client = await site.router([await site.prefill()], [decode])
    async with browsing() as page:
        await page.goto(client.url)
        asking = asyncio.ensure_future(client.text(STREAMED, x_request_id="watched", x_kvberth_mode="pull"))
        row = page.locator("#flight li", has_text="watched")
        await row.get_by_text("pull · late").wait_for()
        await row.get_by_text("decode", exact=True).wait_for()
        assert await row.locator("[data-phase]").evaluate_all("parts => parts.map(part => part.dataset.phase)") == [
            *("queue", "prefill", "transfer", "decode")
        ]
        more.set()
        await asking
        await page.locator("#recent li", has_text="watched").get_by_text("200 ok").wait_for()
        await page.get_by_text("Nothing is in flight.").wait_for()
        assert await page.locator("#ttft .bars").get_by_text("pull").is_visible()


async def test_a_failure_is_shown_with_its_reason(site, browsing):
    """Among the failures, and in the request's own events; those hidden from clients are told from the others."""
    broken = await site.decode(answers({"error": {"message": "no"}}, 500), engine_id="broken")
    client = await site.router([await site.prefill()], [broken])
    async with client.post(PROMPT, x_request_id="seen") as response:
        assert response.status == 500
    async with browsing() as page:
        await page.goto(client.url)
        group = page.locator("#failures li", has_text="500 server_error")
        await group.get_by_text(f"{broken.url} answered 500").wait_for()
        assert broken.url in await group.locator(".where").inner_text()
        await page.locator("#attention").get_by_text("1 request of the last 1 failed").wait_for()
        await group.get_by_role("button", name="seen").click()
        details = page.locator("#recent li", has_text="seen").locator(".details")
        await details.locator("[data-what=leg_failed]").first.wait_for()
        assert "server_error" in await details.inner_text()


async def test_a_failure_that_was_hidden_is_shown(site, browsing):
    """The client got its answer; the operator wants to know at what price."""
    dead, alive = await site.decode(dies, engine_id="dead"), await site.decode(engine_id="alive")
    client = await site.router([await site.prefill()], [dead, alive], decode_policy="round-robin")
    for _ in range(2):
        async with client.post(PROMPT) as response:
            assert response.status == 200
    async with browsing() as page:
        await page.goto(client.url)
        group = page.locator("#failures li", has_text="hidden from the client")
        await group.get_by_text(dead.url).first.wait_for()
        await page.get_by_role("button", name="Failures hidden").click()
        await page.locator("#recent").get_by_text("200 ok, a failure hidden").first.wait_for()


async def test_what_clients_choose_is_text(site, browsing):
    """A request's id, a header's value that was refused: markup in it is shown and not obeyed."""
    client = await site.router([await site.prefill()], [await site.decode()])
    await client.text(PROMPT, x_request_id=MARKUP)
    await client.text(PROMPT, x_request_id=MARKUP, x_kvberth_mode=MARKUP)
    async with browsing() as page:
        await page.goto(client.url)
        rows = page.locator("#recent li .id", has_text=MARKUP)
        await rows.first.wait_for()
        assert await rows.count() == 2
        await page.locator("#recent li", has_text="400").get_by_role("button").click()
        await page.locator(".details", has_text="must be one of push, pull").wait_for()
        assert await page.locator("img, main script, .id b").count() == 0
        assert await page.title() == "kvberth router"


async def test_it_asks_for_the_key_of_a_router_that_has_one(site, browsing):
    """A wrong one is said to be wrong, the right one stays in the tab and can be forgotten; health needs none."""
    client = await site.router([await site.prefill()], [await site.decode()], admin_api_key="the-key")
    async with browsing() as page:
        await page.goto(client.url)
        await page.get_by_label("admin key").fill("another")
        assert await page.locator("#verdict b").inner_text() == "Serving"
        assert await page.locator(".engine[data-role=decode]").is_visible()
        assert not await page.locator("#recent").is_visible()
        await page.get_by_role("button", name="Show").click()
        await page.get_by_text("That is not the router's admin key.").wait_for()
        await page.get_by_label("admin key").fill("the-key")
        await page.keyboard.press("Enter")
        await page.locator("#recent").wait_for()
        assert await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        await page.reload()
        await page.locator("#recent").wait_for()
        await page.get_by_role("button", name="Forget key").click()
        await page.get_by_label("admin key").wait_for()


async def test_it_says_why_it_may_not_look(site, browsing):
    """Behind a proxy, without an admin key: what to do, and health all the same."""
    client = await site.router([await site.prefill()], [await site.decode()])
    async with browsing(extra_http_headers={"x-forwarded-for": "10.1.2.3"}) as page:
        await page.goto(client.url)
        await page.get_by_text("start the router with --admin-api-key").wait_for()
        assert await page.locator(".engine[data-role=decode]").is_visible()


async def test_it_outlives_the_router(site, browsing):
    """A router that is gone is said to be gone, and shown again when it is back; also if it is another one by then."""
    decode = await site.decode()
    config = RouterConfig(prefill=(), decode=(decode.url,), health_interval_seconds=0.05)
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        port = await first.enter_async_context(listening(create_app(config)))
        page = await stack.enter_async_context(browsing())
        await page.goto(f"http://127.0.0.1:{port}")
        await page.get_by_text("Degraded").first.wait_for()
        await first.aclose()
        await page.get_by_text("The router gives no answer since").wait_for()
        await stack.enter_async_context(listening(create_app(config), port=port))
        await page.locator("#verdict", has_text="Degraded").wait_for()


async def test_it_asks_nothing_while_nobody_looks(site, browsing):
    """Paused, or in a tab in the background, it lets the router alone; then it goes on."""
    client = await site.router([await site.prefill()], [await site.decode()])
    async with browsing() as page:
        await page.goto(client.url)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        await until(lambda: len(asked) > 3)
        await page.get_by_role("button", name="Pause").click()
        await page.get_by_text("paused").wait_for()
        await page.clock.install()
        asked.clear()
        await page.clock.run_for(5000)
        assert asked == []
        await page.get_by_role("button", name="Go on").click()
        await until(lambda: len(asked) > 0)
        await page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await page.clock.run_for(100)
        asked.clear()
        await page.clock.run_for(5000)
        assert asked == []


async def test_an_open_request_stays_where_it_is(site, browsing):
    """While new ones come it stays open, and the list stands still; closed, the new ones are there."""
    client = await site.router([await site.prefill()], [await site.decode()])
    await client.text(PROMPT, x_request_id="read-me")
    async with browsing() as page:
        await page.goto(client.url)
        head = page.get_by_role("button", name="read-me")
        await head.focus()
        await page.keyboard.press("Enter")
        before = await head.bounding_box()
        for _ in range(3):
            await client.text(PROMPT, x_request_id="later")
        await page.get_by_text("3 new.").wait_for()
        assert await head.bounding_box() == before
        assert await head.get_attribute("aria-expanded") == "true"
        assert await head.evaluate("head => head === document.activeElement")
        await page.keyboard.press("Enter")
        assert await page.locator("#recent li", has_text="later").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone(site, browsing, scheme):
    """375 pixels wide nothing needs to be scrolled sideways, with long names and an open request."""
    decode = await site.decode(streams(EVENT, DONE), engine_id="d" * 60)
    stuck = await site.decode(hangs)
    client = await site.router([await site.prefill()], [decode])
    await client.text(STREAMED, x_request_id="x" * 200)
    await client.text(PROMPT, x_kvberth_mode="nonsense" * 20)
    client = await site.router(
        [await site.prefill()], [decode, stuck, "http://127.0.0.1:9"], decode_policy="round-robin"
    )
    asking = [asyncio.ensure_future(client.text(STREAMED, x_request_id="r" * 200)) for _ in range(2)]
    async with browsing(viewport=PHONE, color_scheme=scheme) as page:
        await page.goto(client.url)
        await page.locator("#recent .request").first.click()
        await page.locator("#flight .request").first.click()
        await page.locator("#flight .events li").first.wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        PICTURES.mkdir(exist_ok=True)
        await page.screenshot(path=PICTURES / f"router-page-phone-{scheme}.png", full_page=True)
    for each in asking:
        each.cancel()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_its_text_can_be_read(site, browsing, scheme):
    """Against what is behind it each text has the contrast that WCAG 2.2 asks for (AA, 4.5 to 1)."""
    broken = await site.decode(answers({"error": {}}, 500), engine_id="broken")
    client = await site.router([await site.prefill()], [broken, await site.decode(), "http://127.0.0.1:9"])
    for _ in range(6):
        await client.text(PROMPT)
    await client.text(PROMPT, x_kvberth_mode="nonsense")
    async with browsing(color_scheme=scheme) as page:
        await page.goto(client.url)
        await page.locator("#recent .request").last.click()
        assert await page.evaluate(script("poor_contrasts.js")) == []
        PICTURES.mkdir(exist_ok=True)
        await page.evaluate("scrollTo(0, 0)")
        await page.screenshot(path=PICTURES / f"router-page-{scheme}.png", full_page=True)


async def test_it_reckons_what_it_shows(site, browsing):
    """Percentiles, outcomes and groups of failures, of requests that are known."""
    client = await site.router([], [await site.decode(answers(D_ANSWER))], wait_for="degraded")
    async with browsing() as page:
        await page.goto(client.url)
        assert await page.evaluate(script("reckoned.js")) == {
            "percentiles": [None, 3, 10, 19],
            "outcomes": ["ok", "rescued", "failed", "failed", "refused", "rejected", "left", "running"],
            "groups": [
                [True, "429 too_many_requests", 1],
                [True, "502 decode_failed", 1],
                [True, "stream broken decode_failed", 1],
                [False, "decode leg unreachable", 1],
            ],
            "stuck": ["old"],
        }
