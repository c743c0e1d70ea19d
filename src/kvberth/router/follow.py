"""Follows one prefill on its worker's control channel: when to choose the decode worker, and how its handoff goes."""

import asyncio
import time
from collections.abc import Callable

from kvberth.router.binding import JustInTime, PrefillProgress
from kvberth.router.control import Control
from kvberth.router.engines import Engine, EngineInfo
from kvberth.router.timeline import What

__all__ = ["Follow"]

_MARGIN_SECONDS = 0.01
"""How much earlier than it takes a decode worker to register, for what cannot be foreseen."""
_BEHIND_SETUPS = 10
_BEHIND_SECONDS = 0.5
"""A decode worker that has not registered so long after the prefill, or so many times the usual, has no room."""

_NOTHING = PrefillProgress(0, 0, 0, is_registered=False)


class Follow:
    """Calls back on the event loop; nothing is called any more after `close`, which must be called.

    Args:
        engine: the prefill worker, with what it has `info` said of itself.
        on_moment: it is time to choose a decode worker; called once, and not before the first step has begun. None
            where nobody asks for that.
        on_prefilled: the prompt has been computed; its worker's answer comes later, by as much as its front end needs.
        on_behind: see `expect_registration`.
        on_handed_over: all KV is where it is needed; with whether the prompt has been computed.
        note: something has happened that belongs into the request's timeline.
    """

    def __init__(
        self,
        control: Control,
        engine: Engine,
        info: EngineInfo,
        transfer_id: str,
        *,
        on_moment: Callable[[], None] | None,
        on_prefilled: Callable[[], None],
        on_behind: Callable[[], None],
        on_handed_over: Callable[[bool], None],
        note: Callable[[What], None],
    ) -> None:
        self._control = control
        self._transfer_id = transfer_id
        self._pace = engine.pace
        self._plan = JustInTime(engine.pace, _MARGIN_SECONDS)
        self._on_moment = on_moment
        self._on_prefilled = on_prefilled
        self._on_behind = on_behind
        self._on_handed_over = on_handed_over
        self._note = note
        self._heard: PrefillProgress | None = None
        self._moment: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        control.watch(info, transfer_id, self._told)

    def choosing(self) -> None:
        """A decode worker is being chosen: how long it takes to register is learnt for the next ones."""
        self._plan.sent(time.monotonic())

    def expect_registration(self) -> None:
        """The prompt is computed and a decode worker chosen: if it does not register soon, say so once.

        Of a prefill worker that says nothing, nothing is concluded.
        """
        if self._heard is not None and not self._heard.is_registered and self._patience is None:
            seconds = max(_BEHIND_SECONDS, _BEHIND_SETUPS * self._pace.setup_seconds)
            self._patience = asyncio.get_running_loop().call_later(seconds, self._lose_patience)

    def close(self) -> None:
        """Nothing of this prefill is of interest any more."""
        self._control.unwatch(self._transfer_id)
        for timer in (self._moment, self._patience):
            if timer is not None:
                timer.cancel()

    def _told(self, progress: PrefillProgress) -> None:
        now = time.monotonic()
        before, self._heard = self._heard or _NOTHING, progress
        self._plan.told(progress, now)
        if progress.scheduled_tokens > 0 and before.scheduled_tokens == 0:
            self._note(What.PREFILL_BEGAN)
        if progress.is_registered and not before.is_registered:
            self._note(What.REGISTERED)
        if progress.is_complete and not before.is_complete:
            self._note(What.PREFILL_DONE)
            self._on_prefilled()
        self._set_moment(now)
        if progress.is_handed_over:
            self._note(What.TRANSFERRED)
            self._on_handed_over(progress.is_complete)

    def _set_moment(self, now: float) -> None:
        if self._on_moment is None:
            return
        if self._moment is not None:
            self._moment.cancel()
            self._moment = None
        if (bind_at := self._plan.bind_at) is not None:
            self._moment = asyncio.get_running_loop().call_later(max(0.0, bind_at - now), self._ring)

    def _ring(self) -> None:
        on_moment, self._on_moment = self._on_moment, None
        if on_moment is not None:
            on_moment()

    def _lose_patience(self) -> None:
        if self._heard is not None and not self._heard.is_registered:
            self._on_behind()
