"""The router's side of prefill workers' control channels: what it tells them, and what it hears of its prompts."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Self

import zmq

from kvberth.keys import Keyring, PeerRole
from kvberth.protocol import MalformedMessage, Reason, TransferKey, VersionMismatch, decode, encode
from kvberth.protocol.messages import MAX_FRAME_BYTES, Cancel, Message, Progress, Watch
from kvberth.router.binding import PrefillProgress
from kvberth.router.engines import EngineInfo

__all__ = ["Control"]

logger = logging.getLogger(__name__)

_QUEUED_FRAMES = 1000


class Control:
    """Connections to prefill workers, made when they are first needed. For the event loop's thread; nothing waits.

    What is said is a courtesy: an engine that does not hear it holds blocks until their lease ends, or says nothing of
    its progress.

    Args:
        keyring: our keys, and those of the prefill workers that we talk to; without one, we talk to those without.
    """

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring
        self._context = zmq.Context()
        self._lines: dict[tuple[str, str], _Line] = {}
        self._not_spoken_to: dict[str, str] = {}
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
        for line in self._lines.values():
            line.close(linger=100)
        self._lines.clear()
        self._context.term()

    def _send(self, engine: EngineInfo, rank: int, message: Message) -> None:
        if not engine.hears_router:
            return
        if problem := self._problem(engine):
            if self._not_spoken_to.get(engine.engine_id) != problem:
                self._not_spoken_to[engine.engine_id] = problem
                logger.warning("the control channel of prefill worker %s is not used: %s", engine.engine_id, problem)
            return
        line = self._line(f"{engine.control_host}:{engine.control_port + rank}", engine.public_key)
        try:
            line.send(encode(message))
        except zmq.Again:
            logger.warning("prefill worker %s does not read its control messages", engine.engine_id)

    def _problem(self, engine: EngineInfo) -> str:
        """Why we do not talk to this engine; empty when we do. What it says of itself proves nothing."""
        if self._keyring is None:
            return "it wants keys, and this router has none (--control-key-file)" if engine.public_key else ""
        self._keyring.look(time.monotonic())
        found = self._keyring.with_key(engine.public_key)
        if found is None:
            return f"its key is not in {self._keyring.peers_dir}" if engine.public_key else "it has no key"
        return "" if found.role is PeerRole.ENGINE else f"{found.name} is a {found.role} and no engine"

    def _line(self, address: str, public_key: str) -> "_Line":
        line = self._lines.get((address, public_key))
        if line is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
            socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.setsockopt(zmq.IPV6, 1)
            if self._keyring is not None:
                socket.curve_serverkey = public_key.encode()
                socket.curve_publickey = self._keyring.own.certificate.public_key.encode()
                socket.curve_secretkey = self._keyring.own.secret_key.encode()
            socket.connect(f"tcp://{address}")

            def lose() -> None:
                logger.warning("prefill worker at %s does not accept this router's key", address)
                self._lines.pop((address, public_key)).close(linger=0)

            line = self._lines[address, public_key] = _Line(socket, lambda frame: self._hear(frame, address), lose)
        return line

    def _hear(self, frame: bytes, address: str) -> None:
        try:
            message = decode(frame)
        except (MalformedMessage, VersionMismatch) as error:
            logger.warning("prefill worker at %s: %s", address, error)
            return
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


class _Line:
    """A connection, and the socket on which ZeroMQ tells what became of it. Both are read on the event loop.

    Past `zmq.asyncio`, whose futures and tasks cost a request a tenth of all that it takes.

    Args:
        on_frame: gets each message.
        on_refused: the engine does not accept our key. ZeroMQ has given up on the connection.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_frame: Callable[[bytes], None], on_refused: Callable[[], None]):
        self._socket = socket
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._on_frame = on_frame
        self._on_refused = on_refused
        self._reading: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._look)
        self._loop.call_soon(self._look)  # the descriptor gives signs to those only who have looked once

    def send(self, frame: bytes) -> None:
        """Raises `zmq.Again` where too much waits to be read."""
        self._socket.send(frame, zmq.NOBLOCK)
        if self._reading is None:
            # Sending may have taken from the descriptor the sign that something has come.
            self._reading = self._loop.call_soon(self._read)

    def close(self, linger: int) -> None:
        if self._reading is not None:
            self._reading.cancel()
        for each in (self._socket, self._monitor):
            self._loop.remove_reader(each.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger=linger)

    def _read(self) -> None:
        self._reading = None
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)

    def _look(self) -> None:
        if not self._monitor.closed and self._monitor.poll(0):
            self._on_refused()
