"""Follows one prefill on its worker's control channel, and says when to choose the decode worker."""

import asyncio
import time

from kvberth.router.binding import JustInTime, PrefillProgress
from kvberth.router.control import Control
from kvberth.router.engines import Engine, EngineInfo

__all__ = ["Moment"]

_MARGIN_SECONDS = 0.01
"""How much earlier than it takes a decode worker to register, for what cannot be foreseen."""


class Moment:
    """`has_come` is done when it is time. `close` must be called, whatever happened.

    Args:
        engine: the prefill worker, with what it has said of itself.
    """

    def __init__(self, control: Control, engine: Engine, info: EngineInfo, transfer_id: str) -> None:
        self._control = control
        self._transfer_id = transfer_id
        self._plan = JustInTime(engine.pace, _MARGIN_SECONDS)
        self._alarm: asyncio.TimerHandle | None = None
        self.has_come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        control.watch(info, transfer_id, self._told)

    def sent(self) -> None:
        """The decode leg is on its way: how long it takes to register is learnt for the next ones."""
        self._plan.sent(time.monotonic())

    def close(self) -> None:
        """Nothing of this prefill is of interest any more."""
        self._control.unwatch(self._transfer_id)
        if self._alarm is not None:
            self._alarm.cancel()

    def _told(self, progress: PrefillProgress) -> None:
        now = time.monotonic()
        self._plan.told(progress, now)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._plan.bind_at is not None and not self.has_come.done():
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, self._plan.bind_at - now), self._ring)

    def _ring(self) -> None:
        if not self.has_come.done():
            self.has_come.set_result(None)
