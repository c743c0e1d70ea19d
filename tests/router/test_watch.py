"""What the watch learns of engines: their roles and their load."""

import asyncio
import time

import pytest

from kvberth.router.answer import Whole
from kvberth.router.engine_connection import HttpError
from kvberth.router.engines import Engine, EngineInfo, Role
from kvberth.router.watch import _look, _read_load

from .fakes import answers, until

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5}
LOAD = {"num_requests_running": "3", "num_requests_waiting": "2", "kv_cache_usage_perc": "0.25"}
CACHE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1\n'


async def test_one_url_per_engine_is_enough(site):
    """Engines say themselves what they are."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router(engines=(decode.url, prefill.url))
    health = await client.health()
    assert [[each["url"] for each in health[kind]] for kind in ("prefill", "decode", "unknown")] == [
        [prefill.url],
        [decode.url],
        [],
    ]
    async with client.post(PROMPT) as response:
        assert (response.status, response.headers["x-kvberth-path"]) == (200, "push")


async def test_an_engine_that_was_never_heard_from_has_no_role(site):
    """It is shown as that, and with what is wrong."""
    client = await site.router(engines=("http://127.0.0.1:9",), wait_for="unavailable")
    (unknown,) = (await client.health())["unknown"]
    assert (unknown["ready"], unknown["url"]) == (False, "http://127.0.0.1:9")
    assert "Connect" in unknown["problem"]


async def test_an_engine_that_comes_back_in_another_role_has_that_role(site):
    """Even if no look found it gone; and what was learnt of the one before is not believed of it."""
    engine, other = await site.decode(), await site.decode()
    client = await site.router(engines=(engine.url, other.url), wait_for="degraded")
    engine.role, engine.engine_id = "kv_producer", "new"
    await client.until_healthy("ok")
    await client.until_engine(engine, role="prefill", engine_id="new")


async def test_an_asserted_role_is_not_given_up(site):
    """Who asked for a decode worker does not get a prefill worker."""
    decode = await site.decode()
    client = await site.router([], [decode], wait_for="degraded")
    decode.role = "kv_producer"
    await client.until_problem("is a kv_producer, but is configured as a kv_consumer")
    await client.until_engine(decode, role="decode", asserted_role="decode", ready=False)


async def test_the_load_is_read_with_the_health(site):
    """And shown, with what follows from it."""
    decode = await site.decode(load=LOAD)
    decode_metrics = decode.metrics_text
    decode.metrics_text = lambda: CACHE + decode_metrics()
    client = await site.router(engines=(decode.url,), wait_for="degraded")
    load = (await client.engine(decode))["load"]
    assert load.pop("age_seconds") < 5
    assert load == {"running": 3, "waiting": 2, "kv_usage": 0.25, "kv_capacity_tokens": 1600}
    assert (await client.engine(decode))["free_kv_tokens"] == 1200
    labels = f'{{engine="{decode.url}",role="decode"}}'
    figures = {"requests_running": 3, "requests_waiting": 2, "kv_usage_ratio": 0.25, "up": 1, "requests_in_flight": 0}
    for name, value in figures.items():
        assert await client.metric(f"kvberth_router_engine_{name}{labels}") == value
    decode.load = LOAD | {"num_requests_running": "9"}
    await until(lambda: shows_running(client, decode, 9))


async def shows_running(client, engine, running):
    return (await client.engine(engine))["load"]["running"] == running


async def test_a_load_that_cannot_be_read_is_no_failure(site):
    """Neither figures that are missing nor a page that fails take a healthy engine out."""
    decode = await site.decode(load={"num_requests_running": "many"})
    client = await site.router(engines=(decode.url,), wait_for="degraded")
    assert (await client.engine(decode))["load"] is None
    decode.shows_metrics = False
    await asyncio.sleep(0.2)
    assert (await client.engine(decode))["ready"]
    assert await client.text(PROMPT)


async def test_what_is_in_flight_is_shown_with_its_tokens(site):
    """From the start of a leg to its end."""
    may_end = asyncio.Event()
    decode = await site.decode(answers({}, after=may_end))
    client = await site.router(engines=(decode.url,), wait_for="degraded")
    asking = asyncio.ensure_future(client.text(PROMPT))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
    await client.until_engine(decode, in_flight=1, prompt_tokens_in_flight=3)
    may_end.set()
    await asking
    await client.until_engine(decode, in_flight=0, prompt_tokens_in_flight=0)


async def test_the_rate_of_a_prefill_worker_is_measured(site):
    """By the legs that it answered, and not by those that it refused."""
    prefill, decode = await site.prefill(answers({"error": {}}, 400)), await site.decode()
    client = await site.router(engines=(prefill.url, decode.url), mode="pull")
    await client.text(PROMPT)
    assert (await client.engine(prefill))["prefill_tokens_per_second"] is None
    prefill.behave = answers({"kv_transfer_params": {}})
    await client.text(PROMPT)
    assert (await client.engine(prefill))["prefill_tokens_per_second"] > 0


@pytest.mark.parametrize("goes", [False, True])
async def test_a_reading_of_an_engine_that_has_gone_meanwhile_is_not_kept(monkeypatch, goes):
    """What is at its address when it is back may be another one."""
    engine = Engine("http://d", Role.DECODE)
    engine.mark_ready(EngineInfo(Role.DECODE, "d", "", 0, 1))

    async def page(*_: object, **__: object) -> str:
        if goes:
            engine.mark_unready("gone")
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in LOAD.items()) + CACHE

    monkeypatch.setattr("kvberth.router.watch._metrics_text", page)
    await _read_load(None, engine)
    assert (engine.load is None) is goes


class Pages:
    """In place of the client: these pages hang, each after so many answers, or are refused; the others are well."""

    def __init__(self, refused: tuple[str, ...] = (), **answers_left: int) -> None:
        self.refused, self.answers_left = refused, answers_left

    async def fetch(self, _method: str, _url: str, target: str) -> Whole:
        name = target.strip("/")
        if self.answers_left.get(name) == 0:
            await asyncio.Event().wait()
        if name in self.answers_left:
            self.answers_left[name] -= 1
        if name in self.refused:
            raise HttpError("refused")
        return Whole(200, (), b"")


@pytest.fixture
def engine(monkeypatch):
    """In service, and silent if nothing has come for 0.3 s."""
    monkeypatch.setattr("kvberth.router.watch._PATIENCE_SECONDS", 0.3)
    engine = Engine("http://d", Role.DECODE)
    engine.mark_ready(EngineInfo(Role.DECODE, "d", "", 0, 1))
    return engine


async def test_silence_counts_from_the_last_word(engine):
    """One look finds it, also if a token has come after the question: the next look would be seconds later."""

    def a_token_comes() -> None:
        engine.heard_at = time.monotonic()

    asyncio.get_running_loop().call_later(0.1, a_token_comes)
    began = time.monotonic()
    await _look(Pages(health=0), engine)
    assert "gave no answer within" in engine.problem
    assert engine.heard_at > began
    assert time.monotonic() - engine.heard_at >= 0.3


async def test_silence_that_begins_in_the_middle_of_a_look_is_found_by_it(engine):
    """The health was still answered, the load is not: it is asked for its health again."""
    told = []
    engine.on_silent["leg"] = lambda: told.append(True)
    await _look(Pages(health=1, metrics=0), engine)
    assert told == [True]
    assert not engine.is_ready


async def test_an_engine_that_only_keeps_its_load_to_itself_is_not_silent(engine):
    """Its health is answered."""
    await _look(Pages(metrics=0), engine)
    assert engine.is_ready


@pytest.mark.parametrize("seconds_ago", [0.0, 1.0])
async def test_who_refuses_connections_is_silent_once_those_it_has_are(engine, seconds_ago):
    """It may be ending, and still answer what it has taken; a new connection it refuses in any case."""
    told = []
    engine.on_silent["leg"] = lambda: told.append(True)
    engine.heard_at = time.monotonic() - seconds_ago
    await _look(Pages(refused=("health",)), engine)
    assert engine.problem == "refused"
    assert bool(told) is (seconds_ago > 0)
