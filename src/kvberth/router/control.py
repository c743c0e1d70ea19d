"""The router's side of prefill workers' control channels: what it tells them, and what it hears of its prompts."""

import asyncio
import logging
from collections.abc import Callable
from typing import Self, cast

import zmq
import zmq.asyncio

from kvberth.protocol import MalformedMessage, Reason, TransferKey, VersionMismatch, decode, encode
from kvberth.protocol.messages import Cancel, Message, Progress, Watch
from kvberth.router.binding import PrefillProgress
from kvberth.router.engines import EngineInfo

__all__ = ["Control"]

logger = logging.getLogger(__name__)

_QUEUED_FRAMES = 1000


class Control:
    """Connections to prefill workers, made when they are first needed. For the event loop's thread; nothing waits.

    What is said is a courtesy: an engine that does not hear it holds blocks until their lease ends, or says nothing of
    its progress.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._listening: list[asyncio.Task[None]] = []
        self._watches: dict[TransferKey, Callable[[PrefillProgress], None]] = {}

    def watch(self, engine: EngineInfo, transfer_id: str, on_progress: Callable[[PrefillProgress], None]) -> None:
        """Hear how a prompt gets on, until `unwatch`."""
        key = TransferKey(transfer_id)
        self._watches[key] = on_progress
        self._send(engine, 0, Watch(key))

    def unwatch(self, transfer_id: str) -> None:
        """Nothing of this prompt is of interest any more."""
        self._watches.pop(TransferKey(transfer_id), None)

    def abandon(self, engine: EngineInfo, transfer_id: str, num_consumers: int, attempt: int = 0) -> None:
        """Nobody will ask for this transfer's blocks (any more), unless a decode worker has done so already."""
        for rank in range(engine.tp_size):
            for index in range(num_consumers):
                self._send(engine, rank, Cancel(TransferKey(transfer_id, index), attempt, Reason.CONSUMER_GONE))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections; what is queued is given a short time to leave."""
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        for socket in self._sockets.values():
            socket.close(linger=100)
        self._sockets.clear()
        self._context.term()

    def _send(self, engine: EngineInfo, rank: int, message: Message) -> None:
        if not engine.hears_router:
            return
        socket = self._socket(f"{engine.control_host}:{engine.control_port + rank}")
        sending = cast("asyncio.Future[None]", socket.send(encode(message), zmq.NOBLOCK))  # tried at once
        if sending.done() and sending.exception() is not None:
            logger.warning("prefill worker %s does not read its control messages", engine.engine_id)

    def _socket(self, address: str) -> zmq.asyncio.Socket:
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
            socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(f"tcp://{address}")
            self._listening.append(asyncio.create_task(self._listen(socket, address), name=f"control {address}"))
        return socket

    async def _listen(self, socket: zmq.asyncio.Socket, address: str) -> None:
        while True:
            frame = await socket.recv()
            try:
                message = decode(frame)
            except (MalformedMessage, VersionMismatch) as error:
                logger.warning("prefill worker at %s: %s", address, error)
                continue
            if isinstance(message, Progress) and (on_progress := self._watches.get(message.key)) is not None:
                on_progress(
                    PrefillProgress(
                        message.num_tokens,
                        message.scheduled_tokens,
                        message.done_tokens,
                        is_registered=message.is_registered,
                        is_handed_over=message.is_handed_over,
                    )
                )
