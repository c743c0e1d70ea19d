"""What the router and prefill workers tell each other on the control channel."""

import asyncio
import socket

import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from kvberth.keys import KeyPair, Keyring, PeerRole, make_key_pair, write_key_pair
from kvberth.protocol import Reason, TransferKey, decode, encode
from kvberth.protocol.messages import Cancel, Progress, Watch
from kvberth.router.binding import PrefillProgress
from kvberth.router.control import Control
from kvberth.router.engines import EngineInfo, Role

from .fakes import until

pytestmark = pytest.mark.anyio


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def info(port: int, tp_size: int = 1, public_key: str = "") -> EngineInfo:
    return EngineInfo(Role.PREFILL, "engine-0", "127.0.0.1", port, tp_size, public_key)


class Producer:
    """A prefill worker's end."""

    def __init__(self, pair: KeyPair | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        if pair is not None:
            self._socket.curve_server = True
            self._socket.curve_secretkey = pair.secret_key.encode()
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._route = b""
        self._gate: zmq.asyncio.Socket | None = None

    async def hear(self) -> object:
        async with asyncio.timeout(5):
            self._route, frame = await self._socket.recv_multipart()
        return decode(frame)

    async def say(self, message: object) -> None:
        await self._socket.send_multipart([self._route, encode(message)])  # type: ignore[arg-type]

    async def say_raw(self, frame: bytes) -> None:
        await self._socket.send_multipart([self._route, frame])

    async def accept(self, status: bytes) -> bytes:
        """Answer the next question whether a peer may come in; its public key."""
        if self._gate is None:  # kept, since ZeroMQ gives an address back some time after the close
            self._gate = self._context.socket(zmq.REP)
            self._gate.bind("inproc://zeromq.zap.01")
        async with asyncio.timeout(5):
            question = await self._gate.recv_multipart()
        await self._gate.send_multipart([b"1.0", question[1], status, b"", b"", b""])
        return z85.encode(question[6])

    async def hears_nothing(self) -> bool:
        return not await self._socket.poll(200)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close(0)
        self._socket.close(0)
        self._context.term()


async def test_nothing_is_said_to_other_connectors():
    """vLLM's handshake listener dies of a message that it does not expect: not one may come."""
    producer = Producer()
    other = EngineInfo(Role.PREFILL, "engine-0", "127.0.0.1", producer.port, 1, hears_router=False)
    async with Control() as control:
        control.watch(other, "t-1", lambda _: None)
        control.abandon(other, "t-1", 1)
        control.abandon(info(producer.port), "t-2", 1)  # what comes first is what was sent first
        assert await producer.hear() == Cancel(TransferKey("t-2", 0), 0, Reason.CONSUMER_GONE)
    producer.close()


async def test_abandoned_transfer_is_told_for_each_consumer():
    """One `Cancel` each."""
    producer = Producer()
    async with Control() as control:
        control.abandon(info(producer.port), "t-1", 2)
        for index in range(2):
            assert await producer.hear() == Cancel(TransferKey("t-1", index), 0, Reason.CONSUMER_GONE)
    producer.close()


async def test_progress_reaches_who_watches():
    """Of this transfer only, until the end of the watch; rubbish changes nothing."""
    producer, heard = Producer(), asyncio.Queue()
    async with Control() as control:
        control.watch(info(producer.port), "t-1", heard.put_nowait)
        assert await producer.hear() == Watch(TransferKey("t-1"))
        await producer.say_raw(b"rubbish")
        await producer.say(Progress(TransferKey("t-2"), 100, 50, 0, is_registered=False))
        await producer.say(Progress(TransferKey("t-1"), 100, 50, 0, is_registered=True))
        async with asyncio.timeout(5):
            assert await heard.get() == PrefillProgress(100, 50, 0, is_registered=True)
        control.unwatch("t-1")
        await producer.say(Progress(TransferKey("t-1"), 100, 100, 100, is_registered=True))
        await asyncio.sleep(0.1)
    assert heard.empty()
    producer.close()


async def test_engine_that_is_gone_keeps_nobody_waiting():
    """Neither what is said, more than is queued for it, nor the end waits for it."""
    nobody = info(free_port())
    async with asyncio.timeout(5):
        async with Control() as control:
            for number in range(2000):
                control.abandon(nobody, f"t-{number}", 1)


@pytest.fixture
def keyring(tmp_path) -> Keyring:
    """The router's own key, and one of an engine that it accepts."""
    own = make_key_pair("router", PeerRole.ROUTER)
    for pair in (own, ENGINE):
        write_key_pair(pair, tmp_path)
    return Keyring(own, tmp_path)


ENGINE, OTHER = make_key_pair("engine", PeerRole.ENGINE), make_key_pair("other", PeerRole.ENGINE)


async def test_a_prefill_worker_with_a_key_hears_a_router_with_one(keyring):
    """Each has proved its own."""
    producer = Producer(ENGINE)
    async with Control(keyring) as control:
        control.abandon(info(producer.port, public_key=ENGINE.certificate.public_key), "t-1", 1)
        assert await producer.accept(b"200") == keyring.own.certificate.public_key.encode()
        assert await producer.hear() == Cancel(TransferKey("t-1"), 0, Reason.CONSUMER_GONE)
    producer.close()


async def test_a_prefill_worker_is_reached_after_it_has_refused_the_router(keyring):
    """ZeroMQ gives up on a connection that was refused; the next word to the engine makes a new one."""
    producer = Producer(ENGINE)
    engine = info(producer.port, public_key=ENGINE.certificate.public_key)
    async with Control(keyring) as control:
        control.abandon(engine, "t-1", 1)
        await producer.accept(b"400")
        await until(lambda: control._lines == {})
        control.abandon(engine, "t-2", 1)
        await producer.accept(b"200")
        assert await producer.hear() == Cancel(TransferKey("t-2"), 0, Reason.CONSUMER_GONE)
    producer.close()


async def test_an_engine_that_lies_about_its_key_hears_nothing(keyring):
    """It names an accepted one, and has another."""
    producer = Producer(OTHER)
    async with Control(keyring) as control:
        control.abandon(info(producer.port, public_key=ENGINE.certificate.public_key), "t-1", 1)
        assert await producer.hears_nothing()
    producer.close()


@pytest.mark.parametrize(
    ("has_keys", "public_key", "text"),
    [
        (True, OTHER.certificate.public_key, "its key is not in"),
        (True, "", "it has no key"),
        (True, "router", "router is a router and no engine"),
        (False, ENGINE.certificate.public_key, "it wants keys, and this router has none"),
    ],
)
async def test_engines_that_do_not_fit_are_not_spoken_to(keyring, caplog, has_keys, public_key, text):
    """The log says why, once."""
    public_key = keyring.own.certificate.public_key if public_key == "router" else public_key
    async with Control(keyring if has_keys else None) as control:
        for _ in range(3):
            control.abandon(info(free_port(), public_key=public_key), "t-1", 1)
        assert control._lines == {}
    assert [text in record.getMessage() for record in caplog.records] == [True]
