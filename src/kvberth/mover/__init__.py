"""The background side of the handoff: the thread that owns the transport and the control channel.

Who owns what. One thread per rank (`Mover`) owns everything that moves: the transport's agent, the ZeroMQ sockets, the
two machines and the table of peers. The engine's threads only put `Command`s into its inbox and take `Results` out of
its outbox; those two queues are all that is shared, each behind its own lock.
"""

from kvberth.mover.commands import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    Command,
    DeclineRequest,
    EndPrefill,
    Fence,
    FinishPrefill,
    RestartPrefill,
    SchedulePrefill,
)
from kvberth.mover.mover import Mover, MoverFailed
from kvberth.mover.results import Results, TransferReport

__all__ = [
    "AbortRequest",
    "AdvancePrefill",
    "AnnouncePrefill",
    "AwaitRequest",
    "Command",
    "DeclineRequest",
    "EndPrefill",
    "Fence",
    "FinishPrefill",
    "Mover",
    "MoverFailed",
    "RestartPrefill",
    "Results",
    "SchedulePrefill",
    "TransferReport",
]
