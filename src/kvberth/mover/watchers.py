"""Routers that want to know how a prefill gets on, to choose its decode worker shortly before it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvberth.protocol import TransferKey
from kvberth.protocol.events import (
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    ProducerEvent,
)
from kvberth.protocol.messages import Progress

__all__ = ["Watchers"]

_KEPT = 10_000
"""Above this number the transfer that has been watched for longest is forgotten: a dead router leaves its wishes."""


@dataclass(slots=True)
class _Watched:
    routes: set[bytes] = field(default_factory=set)
    num_tokens: int = 0
    scheduled: int = 0
    done: int = 0
    is_registered: bool = False


class Watchers:
    """Who watches which transfer, and what it was told last. Used by the mover's thread only.

    Args:
        block_size: tokens per block.
        send: a message to a route.
    """

    def __init__(self, block_size: int, send: Callable[[bytes, Progress], None]) -> None:
        self._block_size = block_size
        self._send = send
        self._watched: dict[TransferKey, _Watched] = {}

    def watch(self, key: TransferKey, route: bytes, standing: tuple[int, int, bool]) -> None:
        """Tell `route` of this transfer from now on.

        Args:
            standing: tokens of the prompt, 0 if it has not been announced yet; tokens done; whether one is registered.
        """
        num_tokens, done, is_registered = standing
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched(set(), num_tokens, done, done, is_registered)
        watched.routes.add(route)
        if watched.num_tokens:
            self._tell(key, watched)
        while len(self._watched) > _KEPT:
            del self._watched[next(iter(self._watched))]

    def scheduled(self, key: TransferKey, num_tokens: int) -> None:
        """The engine begins a step after which so many tokens of the prompt will have been computed."""
        if (watched := self._watched.get(key)) is not None:
            watched.scheduled = num_tokens
            self._tell(key, watched)

    def happened(self, key: TransferKey, event: ProducerEvent) -> None:
        """Something happened to a transfer."""
        watched = self._watched.get(key)
        if watched is None:
            return
        match event:
            case PrefillAnnounced(num_tokens=num_tokens):
                watched.num_tokens = num_tokens
            case PrefillAdvanced(first, blocks, is_complete):
                watched.done = watched.num_tokens if is_complete else (first + len(blocks)) * self._block_size
            case PrefillRestarted():
                watched.scheduled = watched.done = 0
            case PrefillFinished():
                watched.done = watched.num_tokens
            case _:
                return
        self._tell(key, watched)

    def registered(self, key: TransferKey) -> None:
        """A decode worker's registration stands."""
        watched = self._watched.get(key)
        if watched is not None and not watched.is_registered:
            watched.is_registered = True
            self._tell(key, watched)

    def over(self, key: TransferKey, *, is_handed_over: bool) -> None:
        """The transfer has ended."""
        watched = self._watched.pop(key, None)
        if watched is not None and is_handed_over:
            self._tell(key, watched, is_handed_over=True)

    def _tell(self, key: TransferKey, watched: _Watched, *, is_handed_over: bool = False) -> None:
        message = Progress(
            key, watched.num_tokens, watched.scheduled, watched.done, watched.is_registered, is_handed_over
        )
        for route in watched.routes:
            self._send(route, message)
