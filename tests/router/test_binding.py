"""When the decode worker is chosen."""

import asyncio

import pytest
from tests.router.test_control import Producer

from kvberth.protocol import TransferKey
from kvberth.protocol.messages import Progress, Watch
from kvberth.router.binding import Binding, JustInTime, Pace, PrefillProgress

from .fakes import Client, answers, until

PARAMS = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 14579}


async def head(client: Client, body: object, **headers: str) -> tuple[int, str]:
    """The answer's status, and how the request was bound."""
    async with client.post(body, **headers) as response:
        return response.status, response.headers["x-kvberth-binding"]


def told(plan: JustInTime, now: float, scheduled: int, done: int, *, is_registered: bool = False) -> float | None:
    """P's word of a prompt of 1,000 tokens; the moment that follows."""
    plan.told(PrefillProgress(1000, scheduled, done, is_registered=is_registered), now)
    return plan.bind_at


def known(rate: float = 1000.0, setup: float = 0.05) -> Pace:
    pace = Pace()
    pace.saw_step(1000, 1000 / rate)
    pace.setup_seconds = setup
    return pace


def test_queued_prompt_has_no_moment():
    """Nothing of it has been computed: its end is not known."""
    assert told(JustInTime(known(), 0.01), 10.0, 0, 0) is None


def test_moment_is_the_setup_time_before_the_expected_end():
    """1,000 tokens at 1,000 per second, begun at 10 s; 50 ms to set up, 10 ms for safety."""
    assert told(JustInTime(known(), 0.01), 10.0, 250, 0) == pytest.approx(11.0 - 0.06)


def test_each_step_corrects_the_expectation():
    """The first quarter took twice as long as expected: 1,250 tokens in 1.5 s, the older ones faded a little."""
    pace = known()
    plan = JustInTime(pace, 0.01)
    told(plan, 10.0, 250, 0)
    told(plan, 10.4, 500, 0)  # the next step is scheduled before the first is done
    moment = told(plan, 10.5, 500, 250)
    assert pace.tokens_per_second == pytest.approx(1250 / 1.5, rel=0.01)
    assert moment == pytest.approx(10.5 + 750 / pace.tokens_per_second - 0.06)


def test_word_of_steps_that_comes_at_once_is_no_burst_of_speed():
    """Half a prompt at 1,000 tokens per second, told of in the same millisecond."""
    pace = known()
    plan = JustInTime(pace, 0.01)
    told(plan, 10.0, 25, 0)
    for step in range(1, 21):
        moment = told(plan, 10.5 + step * 1e-5, 25 * step + 25, 25 * step)
    assert pace.tokens_per_second == pytest.approx(1000, rel=0.02)
    assert moment == pytest.approx(11.0 - 0.06, abs=0.02)


def test_old_pace_is_forgotten():
    """A worker that is half as fast as it was is known as such some prompts later."""
    pace = known(rate=10_000)
    for _ in range(60):
        pace.saw_step(1000, 0.2)
    assert pace.tokens_per_second == pytest.approx(5000, rel=0.05)


def test_unknown_worker_is_bound_at_once():
    """The first request of a prefill worker is the one that is learnt from."""
    plan = JustInTime(Pace(), 0.01)
    assert told(plan, 10.0, 500, 0) == 10.0
    told(plan, 10.5, 1000, 500)
    told(plan, 11.0, 1000, 1000)
    assert told(JustInTime(plan._pace, 0.01), 20.0, 500, 0) == pytest.approx(21.0 - 0.03)


def test_setup_time_is_learnt_from_registrations():
    """From the sending of the decode leg on; a fifth of the way."""
    pace = known(setup=0.05)
    plan = JustInTime(pace, 0.01)
    told(plan, 10.0, 500, 0)
    plan.sent(10.4)
    told(plan, 10.7, 500, 0, is_registered=True)
    told(plan, 11.7, 1000, 500, is_registered=True)
    assert pace.setup_seconds == pytest.approx(0.05 + 0.2 * (0.3 - 0.05))


def test_preempted_prompt_begins_anew():
    """What was computed is lost, and so is the expectation."""
    plan = JustInTime(known(), 0.01)
    told(plan, 10.0, 500, 0)
    told(plan, 10.5, 1000, 500)
    assert told(plan, 10.6, 0, 0) is None
    assert told(plan, 12.0, 500, 0) == pytest.approx(13.0 - 0.06)


@pytest.mark.anyio
async def test_decode_leg_is_sent_shortly_before_the_prefill_ends(site):
    """Not before P has said that it computes; with the parameters of a push."""
    producer = Producer()
    finish = asyncio.Event()
    prefill = await site.prefill(answers({"kv_transfer_params": PARAMS}, after=finish))
    prefill.control = ("127.0.0.1", producer.port)
    decode = await site.decode(answers({"choices": [{"text": "yes"}]}))
    client = await site.router([prefill], [decode], binding=Binding.JIT)
    asking = asyncio.ensure_future(head(client, {"prompt": "A", "max_tokens": 1}))
    watch = await producer.hear()
    assert isinstance(watch, Watch)
    await producer.say(Progress(watch.key, 1000, 0, 0, is_registered=False))
    await asyncio.sleep(0.2)
    assert decode.seen == []
    await producer.say(Progress(watch.key, 1000, 500, 0, is_registered=False))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
    assert not finish.is_set()
    assert decode.seen[0].transfer["remote_port"] == producer.port
    assert TransferKey(decode.seen[0].transfer["transfer_id"]) == watch.key
    assert await asking == (200, "jit")
    finish.set()
    producer.close()


@pytest.mark.anyio
async def test_prefill_that_ends_before_its_moment_is_bound_late(site):
    """P says nothing of its progress: D gets what P answered."""
    prefill = await site.prefill(answers({"kv_transfer_params": PARAMS}))
    decode = await site.decode(answers({"choices": [{"text": "yes"}]}))
    client = await site.router([prefill], [decode])
    async with client.post({"prompt": "A", "max_tokens": 1}, x_kvberth_binding="jit") as response:
        assert response.status == 200
    assert decode.seen[0].transfer == PARAMS


@pytest.mark.anyio
async def test_late_binding_waits_for_the_prefill(site):
    """In push as well: D registers when P is done."""
    finish = asyncio.Event()
    prefill = await site.prefill(answers({"kv_transfer_params": PARAMS}, after=finish))
    decode = await site.decode(answers({"choices": [{"text": "yes"}]}))
    client = await site.router([prefill], [decode])
    asking = asyncio.ensure_future(head(client, {"prompt": "A", "max_tokens": 1}, x_kvberth_binding="late"))
    await asyncio.sleep(0.2)
    assert decode.seen == []
    finish.set()
    assert await asking == (200, "late")
    assert decode.seen[0].transfer == PARAMS


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "mode"), [({"x_kvberth_binding": "late"}, "push"), ({"x_kvberth_mode": "pull"}, "pull")]
)
async def test_a_late_choice_does_not_wait_for_the_front_end(site, headers, mode):
    """P's connector says that the prompt is computed; that its HTTP server says so too takes longer."""
    producer = Producer()
    finish = asyncio.Event()
    prefill = await site.prefill(answers({"kv_transfer_params": PARAMS}, after=finish))
    prefill.control = ("127.0.0.1", producer.port)
    decode = await site.decode(answers({"choices": [{"text": "yes"}]}))
    client = await site.router([prefill], [decode])
    asking = asyncio.ensure_future(head(client, {"prompt": "A", "max_tokens": 1}, **headers))
    watch = await producer.hear()
    await producer.say(Progress(watch.key, 1000, 1000, 0, is_registered=False))
    await asyncio.sleep(0.2)
    assert decode.seen == []
    await producer.say(Progress(watch.key, 1000, 1000, 1000, is_registered=False))
    assert await asking == (200, "late")
    assert not finish.is_set()
    [leg] = decode.seen
    assert leg.transfer["transfer_mode"] == mode
    assert TransferKey(leg.transfer["transfer_id"]) == watch.key
    producer.close()


@pytest.mark.anyio
async def test_unknown_binding_is_refused(site):
    """With what would be right."""
    client = await site.router([], [await site.decode()], wait_for="degraded")
    async with client.post({"prompt": "A"}, x_kvberth_binding="soon") as response:
        assert response.status == 400
        assert "early, jit, late" in (await response.json())["error"]["message"]


BUSY = {"num_requests_running": "9", "num_requests_waiting": "0", "kv_cache_usage_perc": "0.9"}
IDLE = {"num_requests_running": "0", "num_requests_waiting": "0", "kv_cache_usage_perc": "0.0"}


class Uneven:
    """One prefill worker, and two decode workers whose loads change places behind the router's back."""

    def __init__(self, site) -> None:
        self._site = site
        self.finish = asyncio.Event()

    async def start(self, control: tuple[str, int] = ("10.0.0.9", 14579), **settings: object) -> Client:
        behave = answers({"kv_transfer_params": PARAMS}, after=self.finish)
        self.prefill = await self._site.prefill(behave, control=control)
        self.first, self.second = [
            await self._site.decode(answers({"choices": [{"text": "yes"}]}), load=dict(load), kv_blocks=100)
            for load in (IDLE, BUSY)
        ]
        return await self._site.router(
            [self.prefill], [self.first, self.second], health_interval_seconds=60, **settings
        )

    async def change_places(self) -> None:
        await asyncio.sleep(0.06)  # the reading at the start is not fresh any more
        self.first.load, self.second.load = dict(BUSY), dict(IDLE)


@pytest.mark.anyio
@pytest.mark.parametrize("headers", [{"x_kvberth_binding": "late"}, {"x_kvberth_mode": "pull"}])
async def test_a_late_choice_is_made_on_fresh_load(site, headers):
    """The last regular look was long ago; what has changed during the prefill counts."""
    uneven = Uneven(site)
    client = await uneven.start()
    asking = asyncio.ensure_future(head(client, {"prompt": "A", "max_tokens": 1}, **headers))
    await uneven.prefill.arrived.wait()
    await uneven.change_places()
    uneven.finish.set()
    assert await asking == (200, "late")
    assert (len(uneven.first.seen), len(uneven.second.seen)) == (0, 1)


@pytest.mark.anyio
async def test_a_choice_just_in_time_is_made_on_fresh_load(site):
    """As well, and before the prefill has ended."""
    uneven, producer = Uneven(site), Producer()
    client = await uneven.start(binding=Binding.JIT, control=("127.0.0.1", producer.port))
    asking = asyncio.ensure_future(head(client, {"prompt": "A", "max_tokens": 1}))
    watch = await producer.hear()
    await uneven.change_places()
    await producer.say(Progress(watch.key, 1000, 500, 0, is_registered=False))
    assert await asking == (200, "jit")
    assert not uneven.finish.is_set()
    assert (len(uneven.first.seen), len(uneven.second.seen)) == (0, 1)
    producer.close()


@pytest.mark.anyio
async def test_an_early_choice_is_made_on_what_was_read_last(site):
    """Nobody waits for a reading."""
    uneven = Uneven(site)
    client = await uneven.start(binding=Binding.EARLY)
    await uneven.change_places()
    uneven.finish.set()
    assert await head(client, {"prompt": "A", "max_tokens": 1}) == (200, "early")
    assert (len(uneven.first.seen), len(uneven.second.seen)) == (1, 0)


@pytest.mark.anyio
async def test_requests_that_choose_at_the_same_time_share_a_reading(site):
    """An engine is not asked for its load by each of them."""
    uneven = Uneven(site)
    client = await uneven.start(binding=Binding.LATE)
    asking = [asyncio.ensure_future(head(client, {"prompt": "A", "max_tokens": 1})) for _ in range(20)]
    await until(lambda: len(uneven.prefill.seen) == 20)
    await uneven.change_places()
    uneven.finish.set()
    assert await asyncio.gather(*asking) == [(200, "late")] * 20
    assert 1 <= uneven.first.loads_read < 20
