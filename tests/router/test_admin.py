"""Engines that come, drain and go while the router serves."""

import asyncio
import logging
import os
import signal

import pytest

from kvberth.router import RouterConfig, create_app
from kvberth.router.hosts import is_loopback_address

from .fakes import D_ANSWER, answers, hangs, streams, streams_on, until

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "hi", "max_tokens": 5}
EVENT = b'data: {"choices":[]}\n\n'
ENGINES = "/kvberth/engines"


async def ask(client, method, path, body=None, **headers):
    async with client.admin(method, path, body, **headers) as response:
        return response.status, await response.json()


async def error_of(client, method, path, body=None, **headers):
    status, said = await ask(client, method, path, body, **headers)
    assert set(said["error"]) == {"message", "type", "param", "code"}
    return status, said["error"]["code"]


def watches():
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("watch ")}


async def test_engines_are_added_while_the_router_serves(site, tmp_path):
    """From nobody to a pair that serves; what is added twice is there once."""
    (tmp_path / "engines").touch()
    client = await site.router(wait_for="unavailable", engines_file=str(tmp_path / "engines"))
    prefill, decode = await site.prefill(), await site.decode()
    assert (await ask(client, "POST", ENGINES, {"url": decode.url + "/"}))[0] == 201
    status, said = await ask(client, "POST", ENGINES, {"url": prefill.url, "role": "prefill"})
    assert (status, said["url"], said["asserted_role"], said["source"]) == (201, prefill.url, "prefill", "api")
    await client.until_healthy("ok")
    assert (await ask(client, "POST", ENGINES, {"url": prefill.url, "role": "prefill"}))[0] == 200
    assert await error_of(client, "POST", ENGINES, {"url": prefill.url, "role": "decode"}) == (409, "engine_exists")
    async with client.post(PROMPT) as response:
        assert (response.status, response.headers["x-kvberth-path"]) == (200, "push")


async def test_everything_known_of_an_engine_is_shown(site):
    """In words that a person reads."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    assert await client.engine(prefill) == {
        "url": prefill.url,
        "role": "prefill",
        "asserted_role": "prefill",
        "source": "settings",
        "ready": True,
        "problem": None,
        "draining": False,
        "leaving": False,
        "engine_id": "p",
        "control_address": "10.0.0.9:14579",
        "tp_size": 1,
        "in_flight": 0,
        "prompt_tokens_in_flight": 0,
        "transfers": 0,
        "free_kv_tokens": None,
        "prefill_tokens_per_second": None,
        "load": None,
        "breaker": {"state": "closed", "failures_in_a_row": 0, "retry_in_seconds": None},
    }


async def test_a_draining_engine_ends_what_it_has_and_gets_nothing_new(site):
    """A stream goes on; the next request is served elsewhere, until the engine is back."""
    may_go_on = asyncio.Event()
    draining = await site.decode(streams(EVENT, then=streams_on(EVENT, after=may_go_on)))
    client = await site.router([], [draining], wait_for="degraded")
    async with asyncio.timeout(5), client.post(PROMPT) as response:
        assert await response.content.readany() == EVENT
        status, said = await ask(client, "POST", ENGINES + "/drain", {"url": draining.url})
        assert (status, said["draining"], said["in_flight"]) == (200, True, 1)
        async with client.post(PROMPT) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "no_decode_worker")
        assert (await client.health())["status"] == "unavailable"
        may_go_on.set()
        assert await response.content.read() == EVENT
    await client.until_engine(draining, in_flight=0)
    assert len(draining.seen) == 1
    assert (await ask(client, "POST", ENGINES + "/resume", {"url": draining.url}))[1]["draining"] is False
    draining.behave = answers(D_ANSWER)
    async with client.post(PROMPT) as response:
        assert response.status == 200


async def test_a_removed_engine_goes_with_its_last_request(site):
    """Its task and its metrics go with it."""
    may_end = asyncio.Event()
    leaving, staying = await site.decode(answers(D_ANSWER, after=may_end)), await site.decode()
    client = await site.router([], [leaving], wait_for="degraded")
    asking = asyncio.ensure_future(client.text(PROMPT))
    async with asyncio.timeout(5):
        await leaving.arrived.wait()
    status, said = await ask(client, "DELETE", f"{ENGINES}?url={leaving.url}")
    assert (status, said["leaving"], said["draining"]) == (200, True, True)
    await ask(client, "POST", ENGINES, {"url": staying.url})
    await client.until_engine(staying, ready=True)
    assert (await ask(client, "POST", ENGINES, {"url": staying.url, "role": "decode"}))[0] == 200
    assert await client.text(PROMPT)
    assert len(leaving.seen) == 1
    assert watches() == {f"watch {leaving.url}", f"watch {staying.url}"}
    may_end.set()
    await asking
    await until(lambda: is_gone(client, leaving))
    await until(lambda: watches() == {f"watch {staying.url}"})
    async with client.get("/metrics") as response:
        page = await response.text()
    assert staying.url in page
    assert leaving.url not in page


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_prefill_worker_is_needed_until_its_kv_has_arrived(site, mode):
    """It has answered, but a decode worker may be reading still: with D's first bytes it may go."""
    first_token = asyncio.Event()
    prefill = await site.prefill()
    decode = await site.decode(streams(EVENT, after=first_token, then=streams_on(EVENT, after=asyncio.Event())))
    client = await site.router([prefill], [decode], mode=mode)
    async with asyncio.timeout(5):
        asking = asyncio.ensure_future(client.text(PROMPT | {"stream": True}))
        await decode.arrived.wait()
        await client.until_engine(prefill, in_flight=0, transfers=1)
        status, said = await ask(client, "DELETE", f"{ENGINES}?url={prefill.url}")
        assert (status, said["leaving"]) == (200, True)
        assert await client.engine(prefill)
        first_token.set()
        await until(lambda: is_gone(client, prefill))
    assert not asking.done()
    asking.cancel()


async def test_an_abandoned_transfer_needs_nobody(site):
    """A client that goes away leaves no engine counted as needed."""
    prefill, decode = await site.prefill(), await site.decode(hangs)
    client = await site.router([prefill], [decode])
    asking = asyncio.ensure_future(client.text(PROMPT))
    async with asyncio.timeout(5):
        await client.until_engine(prefill, in_flight=0, transfers=1)
        asking.cancel()
        await client.until_engine(prefill, transfers=0)


async def is_gone(client, engine):
    return await client.engine(engine) is None


async def test_a_removed_engine_can_be_added_again_before_it_is_gone(site):
    """It is taken back as it is."""
    may_end = asyncio.Event()
    decode = await site.decode(answers(D_ANSWER, after=may_end))
    client = await site.router([], [decode], wait_for="degraded")
    asking = asyncio.ensure_future(client.text(PROMPT))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
    await ask(client, "DELETE", f"{ENGINES}?url={decode.url}")
    status, said = await ask(client, "POST", ENGINES, {"url": decode.url})
    assert (status, said["leaving"], said["draining"], said["in_flight"]) == (200, False, False, 1)
    may_end.set()
    await asking
    assert await client.text(PROMPT)
    assert len(watches()) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", ENGINES, {"url": "nonsense"}, (400, "invalid_url")),
        ("POST", ENGINES, {"url": "http://a", "role": "both"}, (400, "invalid_body")),
        ("POST", ENGINES, {"url": "http://a", "rule": "decode"}, (400, "invalid_body")),
        ("POST", ENGINES, {"url": "http://a" + "a" * 70_000}, (413, "body_too_large")),
        ("POST", ENGINES, None, (400, "invalid_body")),
        ("POST", ENGINES + "/drain", {"url": "http://a"}, (404, "unknown_engine")),
        ("POST", ENGINES + "/resume", {"url": "http://a"}, (404, "unknown_engine")),
        ("DELETE", ENGINES + "?url=http://a", None, (404, "unknown_engine")),
        ("DELETE", ENGINES, None, (400, "missing_url")),
        ("PUT", ENGINES, None, (405, "method_not_allowed")),
    ],
)
async def test_mistakes_are_told_in_openais_form(site, method, path, body, error):
    """And change nothing."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    assert await error_of(client, method, path, body) == error
    assert len(watches()) == 1


@pytest.mark.parametrize("sign", ["x_forwarded_for", "forwarded", "origin", "x_real_ip"])
async def test_without_a_key_only_programs_of_this_machine_are_served(site, sign):
    """What a proxy passes on, or a browser sends for some page, comes from elsewhere."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    assert (await ask(client, "GET", ENGINES))[0] == 200
    assert await error_of(client, "GET", ENGINES, **{sign: "127.0.0.1"}) == (403, "admin_is_local")


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback_is_an_address(host, is_loopback):
    """Names prove nothing."""
    assert is_loopback_address(host) is is_loopback


@pytest.mark.parametrize(
    ("authorization", "is_served"),
    [
        ("Bearer s3cret", True),
        ("bearer s3cret", True),
        ("Bearer s3cre", False),
        ("Bearer ", False),
        ("Basic s3cret", False),
        ("s3cret", False),
        (None, False),
    ],
)
async def test_with_a_key_whoever_has_it_is_served(site, authorization, is_served):
    """From everywhere, and nobody else: not this machine either."""
    client = await site.router([], [await site.decode()], wait_for="degraded", admin_api_key="s3cret")
    headers = {"authorization": authorization} if authorization is not None else {}
    if is_served:
        assert (await ask(client, "GET", ENGINES, x_forwarded_for="10.0.0.1", **headers))[0] == 200
    else:
        for method, path in [("GET", ENGINES), ("POST", ENGINES), ("POST", ENGINES + "/drain"), ("DELETE", ENGINES)]:
            assert await error_of(client, method, path, **headers) == (401, "invalid_admin_key")


async def test_a_hangup_reads_the_engines_file_again(site, tmp_path, caplog):
    """Who is named comes, who is no longer named goes; engines from elsewhere stay."""
    file = tmp_path / "engines"
    by_flag, first, second = [await site.decode(engine_id=name) for name in ("flag", "first", "second")]
    file.write_text(f"{first.url} decode\n{by_flag.url}\n")
    client = await site.router([], [by_flag], wait_for="degraded", engines_file=str(file))
    assert (await client.engine(first))["source"] == "file"
    assert (await client.engine(by_flag))["source"] == "settings"
    file.write_text(f"# moved\n{second.url}\n")
    os.kill(os.getpid(), signal.SIGHUP)
    await client.until_engine(second, ready=True, asserted_role=None)
    await until(lambda: is_gone(client, first))
    assert await client.engine(by_flag) is not None
    assert watches() == {f"watch {by_flag.url}", f"watch {second.url}"}


@pytest.mark.parametrize("text", ["http://a\nhttp://b both\n", None])
async def test_a_file_that_cannot_be_used_changes_nothing(site, tmp_path, caplog, text):
    """And is logged with what is wrong."""
    file = tmp_path / "engines"
    decode = await site.decode()
    file.write_text(decode.url)
    client = await site.router(wait_for="degraded", engines_file=str(file))
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with caplog.at_level(logging.ERROR):
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: bool(caplog.records))
    assert ("cannot be read" if text is None else "line 2") in caplog.text
    assert (await client.engine(decode))["ready"]
    assert await client.text(PROMPT)


async def test_a_role_that_the_file_asserts_later_is_held_to(site, tmp_path):
    """The engine is asked anew, and at once."""
    file = tmp_path / "engines"
    decode = await site.decode()
    file.write_text(decode.url)
    client = await site.router(wait_for="degraded", engines_file=str(file), health_interval_seconds=60)
    file.write_text(f"{decode.url} prefill")
    os.kill(os.getpid(), signal.SIGHUP)
    await client.until_problem("is a kv_consumer, but is configured as a kv_producer", role="prefill")
    file.write_text(f"{decode.url} decode")
    os.kill(os.getpid(), signal.SIGHUP)
    await client.until_engine(decode, ready=True, role="decode", asserted_role="decode")


async def test_a_wrong_file_at_the_start_ends_the_start(tmp_path):
    """Before anything is opened."""
    file = tmp_path / "engines"
    file.write_text("nonsense")
    with pytest.raises(ValueError, match="line 1"):
        create_app(RouterConfig(engines_file=str(file)))


async def test_an_engine_that_fails_in_a_row_gets_nothing_for_a_while(site, caplog):
    """Three times 500: then it is out, visibly, and the others serve."""
    broken = await site.decode(answers({"error": {"message": "no"}}, 500), engine_id="broken")
    client = await site.router([], [broken], wait_for="degraded")
    with caplog.at_level(logging.WARNING, "kvberth.router"):
        for _ in range(3):
            async with client.post(PROMPT) as response:
                assert response.status == 500
    async with client.post(PROMPT) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert len(broken.seen) == 3
    assert f"{broken.url} failed 3 times in a row" in caplog.text
    health = await client.health()
    assert (health["status"], health["decode"][0]["breaker"], health["decode"][0]["ready"]) == (
        "unavailable",
        "open",
        True,
    )
    assert (await client.engine(broken))["breaker"]["retry_in_seconds"] > 0
    assert await client.metric(f'kvberth_router_breaker_open{{engine="{broken.url}",role="decode"}}') == 1
    broken.behave = answers(D_ANSWER)
    await client.until_healthy("degraded")
    assert await client.text(PROMPT)
    await client.until_engine(broken, breaker={"state": "closed", "failures_in_a_row": 0, "retry_in_seconds": None})


async def test_a_clients_mistakes_and_slow_tokens_open_no_breaker(site):
    """Neither proves anything against the engine."""
    decode = await site.decode(answers({"error": {}}, 404))
    client = await site.router([], [decode], wait_for="degraded", first_token_timeout_seconds=0.05)
    for _ in range(4):
        async with client.post(PROMPT) as response:
            assert response.status == 404
    decode.behave = streams(after=asyncio.Event())
    for _ in range(4):
        async with client.post(PROMPT | {"stream": True}) as response:
            assert response.status == 504
    assert (await client.health())["decode"][0]["breaker"] == "closed"


async def test_a_prefill_worker_that_fails_in_a_row_is_not_asked(site):
    """Requests are served undivided at once, without trying it first."""
    prefill = await site.prefill(answers({"error": {}}, 500))
    client = await site.router([prefill], [await site.decode()], mode="pull")
    for expected in ["prefill_failed"] * 3 + ["no_prefill_ready"]:
        async with client.post(PROMPT) as response:
            assert (response.status, response.headers["x-kvberth-reason"]) == (200, expected)
    assert len(prefill.seen) == 3


async def test_policies_are_those_of_the_settings(site):
    """Round robin uses both workers of each role, though one has seen the same long prompt and all is free there."""
    settings = {"prefill_policy": "round-robin", "decode_policy": "round-robin"}
    workers = [await site.prefill(), await site.prefill()], [await site.decode(), await site.decode()]
    client = await site.router(*workers, **settings)
    familiar = await site.router(*workers, decode_policy="round-robin", affinity_seconds=9)
    body = PROMPT | {"prompt": "x" * 1000}
    for _ in range(2):
        await client.text(body)
    assert [len(worker.seen) for worker in workers[0] + workers[1]] == [1, 1, 1, 1]
    for _ in range(3):
        await familiar.text(body)
    assert sorted(len(worker.seen) for worker in workers[0]) == [1, 4]


async def test_a_router_that_has_ended_hears_no_hangup(site, tmp_path):
    """The signal is the process's own again."""
    file = tmp_path / "engines"
    file.touch()
    app = create_app(RouterConfig(engines_file=str(file)))
    loop = asyncio.get_running_loop()
    async with app.router.lifespan_context(app):
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    assert not loop.remove_signal_handler(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_a_method_that_is_not_taken_is_answered_with_all_that_are(site):
    """Those of one path are one route."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    async with client.admin("PUT", ENGINES) as response:
        assert response.status == 405
        assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD", "POST", "DELETE"}
    async with client.admin("HEAD", ENGINES) as response:
        assert response.status == 200


CHANGES = [("POST", ENGINES), ("DELETE", ENGINES), ("POST", ENGINES + "/drain"), ("POST", ENGINES + "/resume")]


@pytest.mark.parametrize("key", [None, "s3cret"])
@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_nothing_is_changed_at_the_clients_port(site, method, path, key):
    """Whoever asks, with whatever key; the answer says where it would be. What only shows something is there."""
    decode = await site.decode()
    client = await site.router([], [decode], wait_for="degraded", admin_api_key=key)
    sent = {"json": {"url": decode.url}, "headers": {"authorization": f"Bearer {key}"}}
    async with client.session.request(method, f"{client.url}{path}?url={decode.url}", **sent) as response:
        error = (await response.json())["error"]
    assert response.status == (405 if path == ENGINES else 404)
    assert "admin port (--admin-port)" in error["message"]
    async with client.get(ENGINES, authorization=f"Bearer {key}") as response:
        (engine,) = (await response.json())["engines"]
    assert (engine["draining"], engine["leaving"]) == (False, False)


async def test_the_admin_port_serves_no_clients(site):
    """Nor the page, health or metrics: one port, one purpose."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    for path in ("/v1/completions", "/", "/health", "/metrics"):
        async with client.admin("GET", path) as response:
            assert response.status == 404
    async with client.admin("GET", "/kvberth/requests") as response:
        assert response.status == 200


async def test_it_answers_while_the_router_is_at_its_limit(site):
    """That is when an operator needs it."""
    decode, second = await site.decode(hangs), await site.decode()
    client = await site.router([], [decode], wait_for="degraded", max_in_flight=1)
    asking = asyncio.ensure_future(client.text(PROMPT))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
    async with client.post(PROMPT) as response:
        assert response.status == 429
    assert (await ask(client, "POST", ENGINES, {"url": second.url}))[0] == 201
    asking.cancel()
