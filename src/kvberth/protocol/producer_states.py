"""The states of a transfer on P, and the table of what can happen in them."""

from enum import StrEnum

from kvberth.protocol.events import (
    CancelReceived,
    DeadlineReached,
    DoneReceived,
    PeerLost,
    PrefillAborted,
    PrefillAnnounced,
    PrefillFinished,
    RegisterReceived,
    StatusAsked,
    WritesDone,
    WritesFailed,
)
from kvberth.protocol.table import Table

__all__ = ["PRODUCER_TABLE", "ProducerState"]


class ProducerState(StrEnum):
    """Where a transfer stands on P."""

    NEW = "new"
    COMPUTING = "computing"
    REGISTERED = "registered"
    MATCHED = "matched"
    HELD = "held"
    WRITING = "writing"
    READING = "reading"
    DRAINING = "draining"
    ENDED = "ended"


_S = ProducerState


def _to(*states: ProducerState) -> frozenset[StrEnum]:
    return frozenset(states)


PRODUCER_TABLE: Table = {
    (_S.NEW, PrefillAnnounced): _to(_S.COMPUTING),
    (_S.NEW, RegisterReceived): _to(_S.REGISTERED, _S.NEW),
    (_S.NEW, CancelReceived): _to(_S.ENDED),
    (_S.NEW, DoneReceived): _to(_S.NEW),
    (_S.NEW, StatusAsked): _to(_S.NEW),
    (_S.COMPUTING, PrefillFinished): _to(_S.HELD),
    (_S.COMPUTING, PrefillAborted): _to(_S.ENDED),
    (_S.COMPUTING, RegisterReceived): _to(_S.MATCHED, _S.COMPUTING),
    (_S.COMPUTING, CancelReceived): _to(_S.ENDED),
    (_S.COMPUTING, StatusAsked): _to(_S.COMPUTING),
    (_S.REGISTERED, PrefillAnnounced): _to(_S.MATCHED, _S.COMPUTING),
    (_S.REGISTERED, RegisterReceived): _to(_S.REGISTERED),
    (_S.REGISTERED, CancelReceived): _to(_S.ENDED, _S.REGISTERED),
    (_S.REGISTERED, StatusAsked): _to(_S.REGISTERED),
    (_S.REGISTERED, PeerLost): _to(_S.ENDED),
    (_S.REGISTERED, DeadlineReached): _to(_S.ENDED, _S.REGISTERED),
    (_S.MATCHED, PrefillFinished): _to(_S.WRITING, _S.READING, _S.ENDED),
    (_S.MATCHED, PrefillAborted): _to(_S.ENDED),
    (_S.MATCHED, RegisterReceived): _to(_S.MATCHED, _S.COMPUTING),
    (_S.MATCHED, CancelReceived): _to(_S.ENDED, _S.MATCHED),
    (_S.MATCHED, StatusAsked): _to(_S.MATCHED),
    (_S.MATCHED, PeerLost): _to(_S.ENDED),
    (_S.HELD, RegisterReceived): _to(_S.WRITING, _S.READING, _S.ENDED, _S.HELD),
    (_S.HELD, CancelReceived): _to(_S.ENDED),
    (_S.HELD, StatusAsked): _to(_S.HELD),
    (_S.HELD, DeadlineReached): _to(_S.ENDED),
    (_S.WRITING, WritesDone): _to(_S.ENDED),
    (_S.WRITING, WritesFailed): _to(_S.ENDED),
    (_S.WRITING, RegisterReceived): _to(_S.WRITING),
    (_S.WRITING, CancelReceived): _to(_S.DRAINING, _S.WRITING),
    (_S.WRITING, StatusAsked): _to(_S.WRITING),
    (_S.WRITING, PeerLost): _to(_S.DRAINING),
    (_S.READING, DoneReceived): _to(_S.ENDED, _S.READING),
    (_S.READING, RegisterReceived): _to(_S.READING),
    (_S.READING, CancelReceived): _to(_S.ENDED, _S.READING),
    (_S.READING, StatusAsked): _to(_S.READING),
    (_S.READING, PeerLost): _to(_S.ENDED),
    (_S.DRAINING, WritesDone): _to(_S.ENDED),
    (_S.DRAINING, WritesFailed): _to(_S.ENDED),
    (_S.DRAINING, RegisterReceived): _to(_S.DRAINING),
    (_S.DRAINING, CancelReceived): _to(_S.DRAINING),
    (_S.DRAINING, StatusAsked): _to(_S.DRAINING),
    (_S.DRAINING, PeerLost): _to(_S.DRAINING),
    (_S.ENDED, PrefillAnnounced): _to(_S.ENDED),
    (_S.ENDED, PrefillFinished): _to(_S.ENDED),
    (_S.ENDED, PrefillAborted): _to(_S.ENDED),
    (_S.ENDED, RegisterReceived): _to(_S.ENDED),
    (_S.ENDED, CancelReceived): _to(_S.ENDED),
    (_S.ENDED, DoneReceived): _to(_S.ENDED),
    (_S.ENDED, StatusAsked): _to(_S.ENDED),
    (_S.ENDED, DeadlineReached): _to(_S.ENDED),
    # A `Done` for a transfer that is not being read can only be a late copy.
    (_S.COMPUTING, DoneReceived): _to(_S.COMPUTING),
    (_S.REGISTERED, DoneReceived): _to(_S.REGISTERED),
    (_S.MATCHED, DoneReceived): _to(_S.MATCHED),
    (_S.HELD, DoneReceived): _to(_S.HELD),
    (_S.WRITING, DoneReceived): _to(_S.WRITING),
    (_S.DRAINING, DoneReceived): _to(_S.DRAINING),
}
