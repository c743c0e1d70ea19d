"""Where the time of one handoff went."""

import msgspec

__all__ = ["PrefillTimes", "Timeline"]


class PrefillTimes(msgspec.Struct, frozen=True):
    """What P knows, in seconds before the message that tells it: the clocks of two machines differ.

    Attributes:
        announced: since the request came to P's engine.
        done: since the prompt's KV was complete.
        writes: (seconds, blocks) of each part that was given to the transport, in order; a part follows each step of
            the prefill, so there are as many as chunks.
    """

    announced: float
    done: float
    writes: tuple[tuple[float, int], ...] = ()


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Moments in seconds since D's request began to wait, blocks reserved; None for what has not happened.

    P's moments are placed by the arrival of the message that tells them.

    Attributes:
        registered: D sent its registration.
        accepted: P answered.
        prefill_announced: the request came to P's engine; below 0 if that was before D waited.
        moving: P's first WRITE began, or D's READs.
        prefill_done: the prompt's KV was complete on P.
        ended: the wait was over.
        writes: (moment, blocks) of each part that P wrote.
    """

    registered: float | None = None
    accepted: float | None = None
    prefill_announced: float | None = None
    moving: float | None = None
    prefill_done: float | None = None
    ended: float
    writes: tuple[tuple[float, int], ...] = ()

    @property
    def after_prefill(self) -> float | None:
        """Seconds that the handoff took beyond the prefill: what of it a client waits for."""
        return None if self.prefill_done is None else self.ended - max(0.0, self.prefill_done)
