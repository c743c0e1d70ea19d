"""What the router and prefill workers tell each other on the control channel."""

import asyncio
import socket

import pytest
import zmq
import zmq.asyncio

from kvberth.protocol import Reason, TransferKey, decode, encode
from kvberth.protocol.messages import Cancel, Progress, Watch
from kvberth.router.binding import PrefillProgress
from kvberth.router.control import Control
from kvberth.router.engines import EngineInfo, Role

pytestmark = pytest.mark.anyio


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def info(port: int, tp_size: int = 1) -> EngineInfo:
    return EngineInfo(Role.PREFILL, "engine-0", "127.0.0.1", port, tp_size)


class Producer:
    """A prefill worker's end."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._route = b""

    async def hear(self) -> object:
        async with asyncio.timeout(5):
            self._route, frame = await self._socket.recv_multipart()
        return decode(frame)

    async def say(self, message: object) -> None:
        await self._socket.send_multipart([self._route, encode(message)])  # type: ignore[arg-type]

    async def say_raw(self, frame: bytes) -> None:
        await self._socket.send_multipart([self._route, frame])

    def close(self) -> None:
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
