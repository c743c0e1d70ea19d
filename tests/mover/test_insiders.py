"""What a peer can do that has an accepted key, to transfers and blocks that are not its own: nothing."""

import logging

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mover.rig import BLOCK_BYTES, NUM_BLOCKS, PORT, Engine, Rig

from kvberth.keys import Certificate, PeerRole
from kvberth.layout import Region
from kvberth.mover import AnnouncePrefill, AwaitRequest, FinishPrefill
from kvberth.mover.address import Address
from kvberth.protocol import End, Reason, TransferKey, TransferMode, decode, encode
from kvberth.protocol.events import PrefillAnnounced, PrefillFinished, RequestWaiting
from kvberth.protocol.ids import RequestId
from kvberth.protocol.messages import (
    Alive,
    Cancel,
    Done,
    Ended,
    EngineCard,
    Heartbeat,
    Hello,
    HelloNeeded,
    Incompatible,
    Located,
    Message,
    Progress,
    Quiesced,
    Register,
    Watch,
    Welcome,
    Writing,
    sealed,
)

PUSH, PULL = TransferMode.PUSH, TransferMode.PULL
BOTH = pytest.mark.parametrize("mode", [PUSH, PULL])

D = Certificate("decode-0", PeerRole.ENGINE, "d" * 40)
E = Certificate("decode-1", PeerRole.ENGINE, "e" * 40)
ROUTER = Certificate("router", PeerRole.ROUTER, "r" * 40)


class Insider:
    """Somebody with an accepted key beside D. `say` has P take a message, and returns what P answers."""

    def __init__(self, rig: Rig, sender: Certificate = E, name: str = "E") -> None:
        self.rig, self.sender = rig, sender
        self.engine = Engine(name, rig.fabric, fill=3)
        self.route = b"route-" + name.encode()

    @property
    def card(self) -> EngineCard:
        return self.engine.core._consuming._card

    def say(self, message: Message) -> list[Message]:
        self.rig.producer.core.frame_from_client(self.route, encode(message), self.rig.now, self.sender)
        self.rig.settle()
        answers = [decode(frame) for route, frame in self.rig.to_others if route == self.route]
        self.rig.to_others.clear()
        return answers


def rig_of(mode: TransferMode | None = None) -> Rig:
    """P and D, which has proved its key; with a mode, D is registered for a prompt that P computes."""
    rig = Rig()
    rig.sender = D
    rig.announce()
    if mode is not None:
        rig.wait(mode)
        rig.settle()
    return rig


def register(blocks: tuple[int, ...] = (1, 2, 3), key: TransferKey | None = None, **changes: object) -> Register:
    return Register(
        **(
            {"key": key or TransferKey("t-1"), "attempt": 0, "mode": PUSH, "first_token": 0, "num_tokens": 40}
            | {"prompt_digest": b"digest", "block_size": 16, "blocks": blocks}
            | changes
        )
    )


def assert_handed_over(rig: Rig) -> None:
    """D's transfer goes on to its end, with the right bytes in the right blocks."""
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


@BOTH
def test_a_registered_transfer_is_not_cancelled_by_another_engine(mode):
    """Whatever attempt it names; the answer says only that nothing of P's is in flight to it."""
    rig = rig_of(mode)
    insider = Insider(rig)
    assert isinstance(*insider.say(Hello(insider.card, 1)), Welcome)
    for attempt in (0, 1, 7):
        insider.say(Cancel(rig.key, attempt, Reason.CONSUMER_GONE))
        insider.say(Cancel(rig.key, attempt, Reason.NOT_NEEDED))
    assert_handed_over(rig)


@BOTH
def test_a_registered_transfer_is_not_cancelled_by_a_router(mode):
    """A router gives up what nobody is registered for."""
    rig = rig_of(mode)
    assert Insider(rig, ROUTER).say(Cancel(rig.key, 0, Reason.CONSUMER_GONE)) == []
    assert_handed_over(rig)


def test_a_pull_is_not_ended_by_another_engine():
    """`Done` frees P's blocks, while D still reads them."""
    rig = rig_of(PULL)
    insider = Insider(rig)
    insider.say(Hello(insider.card, 1))
    rig.finish()
    insider.say(Done(rig.key, 0))
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


@pytest.mark.parametrize("attempt", [0, -1])
def test_a_registration_does_not_displace_another_engine_s(attempt):
    """The same attempt, or an older one, under the same transfer id: the first one stands."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    insider.say(Hello(insider.card, 1))
    *_, answer = insider.say(register(attempt=attempt))
    assert isinstance(answer, Ended)
    assert answer.reason is Reason.NEWER_ATTEMPT
    assert_handed_over(rig)
    assert (insider.engine.memory == 3).all()


def test_a_heartbeat_ends_nobody_else_s_transfer():
    """Neither by what it lists nor by what it leaves out."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    insider.say(Hello(insider.card, 1))
    rig.now += 1.5
    *_, answer = insider.say(Heartbeat(((rig.key, 0),)))
    assert isinstance(answer, Ended)
    assert answer.reason is Reason.UNKNOWN_TRANSFER
    insider.say(Heartbeat())
    assert_handed_over(rig)


@pytest.mark.parametrize("incarnation", ["a", "b"])
@pytest.mark.parametrize("session", [0, 1, 99])
def test_another_engine_s_name_is_of_no_use(incarnation, session):
    """Nor is its incarnation: behind the names stands the key. D is neither lost nor taken for restarted."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    card = msgspec.structs.replace(insider.card, engine_id="D", incarnation=incarnation)
    insider.say(Hello(card, session))
    insider.say(Cancel(rig.key, 0, Reason.CONSUMER_GONE))
    insider.say(Heartbeat())
    assert_handed_over(rig)


def test_another_engine_s_transport_is_of_no_use():
    """A card with D's metadata in it: refused, and D keeps its connection."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    card = msgspec.structs.replace(insider.card, agent_metadata=rig.consumer.transport.metadata())
    *_, answer = insider.say(Hello(card, 1))
    assert isinstance(answer, Incompatible)
    assert answer.field == "agent_metadata"
    assert_handed_over(rig)


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("name", ["Q", "P"], ids=["its own name", "the other one's name"])
def test_a_transfer_is_not_ended_by_another_prefill_worker(end, name):
    """D is connected to it, and takes no word of it for a transfer that is with P: its blocks are not given back."""
    rig = rig_of(PUSH)
    other = TransferKey("t-other")
    event = RequestWaiting(RequestId("d-2"), 0, PUSH, 0, 40, b"digest", (20, 21, 22))
    rig.consumer.core.command(AwaitRequest(other, "Q", PORT, event, "q" * 40), rig.now)
    elsewhere = Engine("Q", rig.fabric)
    address = Address(f"Q:{PORT}", "q" * 40)
    card = msgspec.structs.replace(elsewhere.core._consuming._card, engine_id=name, incarnation="a")
    located = Located(rig.key, 0, (1, 2, 3), 16)
    for message in (Welcome(card), Ended(rig.key, 0, end), Quiesced(rig.key, 0), Writing(rig.key, 0), located):
        rig.consumer.core.frame_from_server(address, encode(message), rig.now)
    rig.settle()
    assert rig.received() == []
    assert_handed_over(rig)


def test_one_connection_is_one_engine():
    """Whoever greets under ever new names over one connection leaves nothing behind."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    for number in range(50):
        engine = Engine(f"E{number}", rig.fabric)
        insider.say(Hello(engine.core._consuming._card, 1))
    assert len(rig.producer.core._producing._clients) == 2
    rig.producer.wire.gone.add(insider.route)
    rig.producer.core.clients_broke(rig.now)
    rig.pass_time(3.0, step=0.1)
    assert len(rig.producer.core._producing._clients) == 1
    assert_handed_over(rig)


@pytest.mark.parametrize(
    "message",
    [register(), Heartbeat(), Alive(0.0), Done(TransferKey("t-1"), 0)],
    ids=lambda message: type(message).__name__,
)
def test_a_router_s_key_registers_nothing(message, caplog):
    """Not even a greeting is answered, so that it learns nothing of P's memory."""
    rig = rig_of()
    router = Insider(rig, ROUTER, "R")
    with caplog.at_level(logging.WARNING):
        assert router.say(Hello(router.card, 1)) == []
        assert router.say(message) == []
    assert "router is a router and may not send Hello" in caplog.text
    rig.wait(PUSH)
    rig.settle()
    assert_handed_over(rig)


def test_a_router_s_key_watches_and_gives_up():
    """What routers are for; the blocks are kept for a while for another decode worker, as without keys."""
    rig = rig_of()
    router = Insider(rig, ROUTER, "R")
    *_, answer = router.say(Watch(rig.key))
    assert isinstance(answer, Progress)
    router.say(Cancel(rig.key, 0, Reason.CONSUMER_GONE))
    rig.finish()
    rig.settle()
    assert rig.released() == set()
    rig.pass_time(rig.producer.timing.rebind_seconds + 1)
    assert rig.released() == {"p-1"}


def test_an_engine_s_key_watches_nothing():
    """Of other decode workers' prompts it learns nothing."""
    rig = rig_of()
    insider = Insider(rig)
    assert insider.say(Watch(rig.key)) == []


def test_an_engine_that_has_not_greeted_is_asked_to():
    """Even for a `Cancel`, which only a router may send without."""
    rig = rig_of()
    assert Insider(rig).say(Cancel(rig.key, 0, Reason.NOT_NEEDED)) == [HelloNeeded()]


def test_a_revoked_engine_is_lost():
    """Its registration ends, its connection at the transport is cut, and the blocks are kept for another one."""
    rig = rig_of(PUSH)
    rig.producer.core.client_revoked(rig.route, rig.now)
    rig.finish()
    rig.settle()
    assert not rig.has_bytes()
    rig.pass_time(rig.producer.timing.rebind_seconds + 1)
    assert rig.released() == {"p-1"}


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((1, 2, NUM_BLOCKS), f"block {NUM_BLOCKS} is outside"),
        ((1, -1, 2), "block -1 is outside"),
        ((1, 2, 2**63), "is outside"),
        ((1, 2, 2), "named twice"),
        (tuple(range(NUM_BLOCKS + 1)), f"{NUM_BLOCKS + 1} blocks are named"),
        ((1, 2), "2 blocks registered, 3 needed"),
        ((1, 2, 3, 4), "4 blocks registered, 3 needed"),
    ],
)
def test_a_bad_registration_is_refused_with_a_reason(blocks, text, caplog):
    """And nothing is posted for it; both sides' people can read why."""
    rig = rig_of()
    insider = Insider(rig)
    insider.say(Hello(insider.card, 1))
    with caplog.at_level(logging.ERROR):
        *_, answer = insider.say(register(blocks))
    assert "refused a registration of decode worker E (1): " in caplog.text
    assert text in caplog.text
    assert isinstance(answer, Ended)
    assert (answer.reason, text in answer.detail) == (Reason.INVALID_BLOCKS, True)
    rig.finish()
    rig.settle()
    assert (insider.engine.memory == 3).all()
    assert rig.producer.core.num_waiting() == 0


def test_a_block_of_another_live_registration_is_refused(caplog):
    """Two transfers that write to one block would spoil both; P says why, writes nothing, and serves the first."""
    rig = rig_of(PUSH)
    other = TransferKey("t-2")
    rig.producer.core.command(AnnouncePrefill((other,), PrefillAnnounced(RequestId("p-2"), 40, b"digest")), rig.now)
    event = RequestWaiting(RequestId("d-2"), 0, PUSH, 0, 40, b"digest", (20, 8, 21))
    with caplog.at_level(logging.ERROR):
        rig.consumer.core.command(AwaitRequest(other, "P", PORT, event), rig.now)
        rig.settle()
    assert rig.received() == [("d-2", False, "invalid_blocks")]
    assert "refused a registration of decode worker D (1): block 8 is registered for another transfer" in caplog.text
    rig.producer.core.command(FinishPrefill((other,), PrefillFinished((4, 5, 6))), rig.now)
    rig.settle()
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-2", False, "invalid_blocks"), ("d-1", True, "none")]
    assert rig.has_bytes()


@pytest.mark.parametrize(
    ("first_token", "num_tokens"), [(1, 40), (-16, 40), (48, 40), (2**62, 40), (0, -1), (0, 2**62), (-(2**62), 40)]
)
def test_a_registration_for_other_tokens_is_refused(first_token, num_tokens):
    """Tokens that the prompt does not have, or that begin within a block."""
    rig = rig_of()
    insider = Insider(rig)
    insider.say(Hello(insider.card, 1))
    *_, answer = insider.say(register(first_token=first_token, num_tokens=num_tokens))
    assert isinstance(answer, Ended)
    assert answer.reason in {Reason.INVALID_BLOCKS, Reason.PROMPT_DIFFERS}
    rig.wait(PUSH)
    rig.settle()
    assert_handed_over(rig)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"engine_id": "line\nbreak"}, "printable"),
        ({"engine_id": ""}, "printable"),
        ({"incarnation": "x" * 300}, "printable"),
        ({"rank": -1}, "rank -1"),
        ({"num_blocks": 0}, "0 blocks"),
        ({"num_blocks": 2**40}, "blocks of 16 tokens"),
        ({"regions": ()}, "its regions"),
        ({"regions": (Region(address=0, block_stride=BLOCK_BYTES, block_length=BLOCK_BYTES),)}, "its regions"),
    ],
)
def test_a_card_that_cannot_be_is_refused(changes, text):
    """Before anything is calculated with it."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    *_, answer = insider.say(Hello(msgspec.structs.replace(insider.card, **changes), 1))
    assert isinstance(answer, Incompatible)
    assert text in answer.consumer_value
    assert_handed_over(rig)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_stride": BLOCK_BYTES - 1}, "every 63"),
        ({"address": -1}, "address space"),
        ({"address": 2**64 - BLOCK_BYTES}, "address space"),
        ({"device_index": -1}, "device -1"),
    ],
)
def test_a_region_that_cannot_be_is_refused(changes, text):
    """Blocks that overlap, that wrap around the end of memory, that are nowhere."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    first, second = insider.card.regions
    regions = (first, msgspec.structs.replace(second, **changes))
    *_, answer = insider.say(Hello(msgspec.structs.replace(insider.card, regions=regions), 1))
    assert isinstance(answer, Incompatible)
    assert text in answer.consumer_value
    assert_handed_over(rig)


_INTEGERS = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 16, 40, 2**31, 2**63 - 1, 2**64 - 1])
_KINDS = {int: _INTEGERS, str: st.sampled_from(["", "t-1", "D", "\x00", "x" * 1000]), bytes: st.binary(max_size=40)}
_FLOATS = st.sampled_from([-1e308, -1.0, 0.0, 1e308, float("inf"), float("nan")])


def _changed(draw: st.DrawFn, value: object) -> object:
    """The same message with some of its leaves changed."""
    if isinstance(value, dict):
        return {name: each if name == "type" else _changed(draw, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(draw, each) for each in value][: draw(st.integers(0, 4)) or None]
    if isinstance(value, bool) or draw(st.integers(0, 7)):
        return value
    if isinstance(value, float):
        return draw(_FLOATS)
    return draw(_KINDS[type(value)]) if type(value) in _KINDS else value


@settings(max_examples=300)
@given(data=st.data())
def test_nothing_that_a_peer_says_hurts_anybody_else(data):
    """Well-formed messages with any values in them: no error of ours, no byte of D's changed, and D is served."""
    rig = rig_of(PUSH)
    insider = Insider(rig)
    key = TransferKey("t-9")
    honest = [
        *(Hello(insider.card, 1), register(key=key), register(key=key, mode=PULL), register(key=rig.key)),
        *(Heartbeat(((key, 0), (rig.key, 0)), 0.0), Alive(rig.now), Done(key, 0), Watch(key)),
        *(Cancel(key, 0, Reason.CONSUMER_GONE), Cancel(rig.key, 0, Reason.NOT_NEEDED)),
    ]
    insider.say(honest[0])
    for number in data.draw(st.lists(st.integers(0, len(honest) - 1), min_size=1, max_size=6)):
        message = honest[number]
        if isinstance(message, Register) and message.key == rig.key and message.attempt == 0:
            message = msgspec.structs.replace(message, attempt=0)
        told = _changed(data.draw, msgspec.to_builtins(message, builtin_types=(bytes,)))
        if isinstance(message, Register | Cancel) and isinstance(told, dict):
            told["attempt"] = min(0, told["attempt"])  # a newer attempt may take over: that is what it is for
        frame = sealed(msgspec.msgpack.encode(told))
        rig.producer.core.frame_from_client(insider.route, frame, rig.now, insider.sender)
        rig.settle(3)
    assert_handed_over(rig)
