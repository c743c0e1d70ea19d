"""What the router says to prefill workers, on the control channel that they have for decode workers."""

import logging

import zmq

from kvberth.protocol import Reason, TransferKey, encode
from kvberth.protocol.messages import Cancel
from kvberth.router.engines import EngineInfo

__all__ = ["Control"]

logger = logging.getLogger(__name__)

_QUEUED_FRAMES = 1000


class Control:
    """Connections to prefill workers, made when they are first needed. For the event loop's thread; nothing waits.

    What is said is a courtesy: an engine that does not hear it holds the blocks until their lease ends.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def abandon(self, engine: EngineInfo, transfer_id: str, num_consumers: int) -> None:
        """Nobody will ask for this transfer's blocks (any more), unless a decode worker has done so already."""
        for rank in range(engine.tp_size):
            socket = self._socket(f"{engine.control_host}:{engine.control_port + rank}")
            for index in range(num_consumers):
                frame = encode(Cancel(TransferKey(transfer_id, index), 0, Reason.CONSUMER_GONE))
                try:
                    socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    logger.warning("prefill worker %s does not read its control messages", engine.engine_id)
                    return

    def close(self) -> None:
        """Close the connections; what is queued is given a short time to leave."""
        for socket in self._sockets.values():
            socket.close(linger=100)
        self._sockets.clear()
        self._context.term()

    def _socket(self, address: str) -> "zmq.Socket[bytes]":
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(f"tcp://{address}")
        return socket
