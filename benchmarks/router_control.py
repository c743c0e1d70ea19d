"""The control channel of the benchmark's prefill worker: tells whoever watches a prompt how it gets on."""

import asyncio
from dataclasses import dataclass

import zmq
import zmq.asyncio

from kvberth.protocol import TransferKey, decode, encode
from kvberth.protocol.messages import Progress, Watch

__all__ = ["Control"]

_PROMPT_TOKENS = 4096


@dataclass
class _Transfer:
    watcher: bytes | None = None
    is_begun: bool = False
    is_computed: bool = False
    is_registered: bool = False


class Control:
    """For the thread of one event loop. A transfer is forgotten when it is over."""

    def __init__(self) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._transfers: dict[str, _Transfer] = {}
        self._listening = asyncio.create_task(self._listen())

    def begun(self, transfer_id: str) -> None:
        """Its prompt is computed from now on, in one step."""
        self._of(transfer_id).is_begun = True
        self._tell(transfer_id)

    def computed(self, transfer_id: str) -> None:
        self._of(transfer_id).is_computed = True
        self._tell(transfer_id)
        self._forget_if_over(transfer_id)

    def registered(self, transfer_id: str) -> None:
        """A decode worker has asked for its blocks."""
        self._of(transfer_id).is_registered = True
        self._tell(transfer_id)
        self._forget_if_over(transfer_id)

    def _of(self, transfer_id: str) -> _Transfer:
        return self._transfers.setdefault(transfer_id, _Transfer())

    def _forget_if_over(self, transfer_id: str) -> None:
        transfer = self._of(transfer_id)
        if transfer.is_computed and transfer.is_registered:
            self._tell(transfer_id, is_handed_over=True)
            del self._transfers[transfer_id]

    def _tell(self, transfer_id: str, *, is_handed_over: bool = False) -> None:
        transfer = self._of(transfer_id)
        if transfer.watcher is None:
            return
        progress = Progress(
            TransferKey(transfer_id),
            num_tokens=_PROMPT_TOKENS if transfer.is_begun else 0,
            scheduled_tokens=_PROMPT_TOKENS if transfer.is_begun else 0,
            done_tokens=_PROMPT_TOKENS if transfer.is_computed else 0,
            is_registered=transfer.is_registered,
            is_handed_over=is_handed_over,
        )
        self._socket.send_multipart([transfer.watcher, encode(progress)], zmq.NOBLOCK)

    async def _listen(self) -> None:
        while True:
            watcher, frame = await self._socket.recv_multipart()
            message = decode(frame)
            if isinstance(message, Watch):
                self._of(message.key.transfer_id).watcher = watcher
                self._tell(message.key.transfer_id)
