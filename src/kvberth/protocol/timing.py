"""The clocks' settings, in seconds, in one place."""

import msgspec

__all__ = ["Timing"]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long each side waits for the other.

    Attributes:
        lease_seconds: how long P holds finished blocks that no D has registered for.
        rebind_seconds: how long P holds them when a D has been there and is gone.
        deadline_seconds: how long D waits for the KV cache of one request, P's queue included. It bounds a wait on a
            P that is alive; a P that is not is noticed by its silence.
        orphan_seconds: how long P keeps a registration for a request that it has not received, though its engine has
            taken in new requests since.
        connect_seconds: how long D tries to reach a P that it has not spoken to.
        heartbeat_seconds: interval of heartbeats while a pair of engines has a live transfer.
        silence_seconds: a peer that is silent for so long is lost.
        reconnect_seconds: how long P waits for a D whose connection broke to connect again.
        memory_seconds: how long an ended transfer is remembered, so that late messages get the true answer.
    """

    lease_seconds: float = 30.0
    rebind_seconds: float = 2.0
    deadline_seconds: float = 300.0
    orphan_seconds: float = 10.0
    connect_seconds: float = 5.0
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 3.0
    reconnect_seconds: float = 0.5
    memory_seconds: float = 60.0

    @property
    def grant_seconds(self) -> float:
        """How long P may write to a D after a moment at which D was there.

        D takes its blocks back `silence_seconds` after it has last heard of P. P must have stopped before, with time
        left for what it does last; it counts from a moment of its own that D has answered, which lies before that.
        """
        return 0.9 * self.silence_seconds
