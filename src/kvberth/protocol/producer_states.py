"""The states of a transfer on P, and the table of what can happen in them."""

from enum import StrEnum

from kvberth.protocol.events import (
    CancelReceived,
    DeadlineReached,
    DoneReceived,
    PeerLost,
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    RegisterReceived,
    StatusAsked,
    WritesDone,
    WritesFailed,
)
from kvberth.protocol.table import Table, to

__all__ = ["PRODUCER_TABLE", "ProducerState"]


class ProducerState(StrEnum):
    """Where a transfer stands on P."""

    NEW = "new"
    COMPUTING = "computing"
    REGISTERED = "registered"
    MATCHED = "matched"
    HELD = "held"
    STREAMING = "streaming"
    WRITING = "writing"
    READING = "reading"
    DRAINING = "draining"
    ENDED = "ended"


_S = ProducerState


_ANYWHERE = (_S.COMPUTING, _S.MATCHED, _S.STREAMING, _S.WRITING, _S.READING, _S.HELD, _S.ENDED)
"""Where a transfer can be once nothing is in flight: with the attempt that takes over, or with none."""

PRODUCER_TABLE: Table = {
    (_S.NEW, PrefillAnnounced): to(_S.COMPUTING),
    (_S.NEW, RegisterReceived): to(_S.REGISTERED, _S.NEW),
    (_S.NEW, CancelReceived): to(_S.NEW, _S.ENDED),
    (_S.NEW, DoneReceived): to(_S.NEW),
    (_S.NEW, StatusAsked): to(_S.NEW),
    (_S.COMPUTING, PrefillAdvanced): to(_S.COMPUTING),
    (_S.COMPUTING, PrefillRestarted): to(_S.COMPUTING),
    (_S.COMPUTING, PrefillFinished): to(_S.HELD),
    (_S.COMPUTING, PrefillAborted): to(_S.ENDED),
    (_S.COMPUTING, RegisterReceived): to(_S.MATCHED, _S.COMPUTING, _S.STREAMING, _S.WRITING, _S.READING, _S.ENDED),
    (_S.COMPUTING, CancelReceived): to(_S.COMPUTING, _S.ENDED),
    (_S.COMPUTING, StatusAsked): to(_S.COMPUTING),
    (_S.REGISTERED, PrefillAnnounced): to(_S.MATCHED, _S.COMPUTING, _S.ENDED),
    (_S.REGISTERED, RegisterReceived): to(_S.REGISTERED),
    (_S.REGISTERED, CancelReceived): to(_S.NEW, _S.ENDED, _S.REGISTERED),
    (_S.REGISTERED, StatusAsked): to(_S.REGISTERED),
    (_S.REGISTERED, PeerLost): to(_S.NEW),
    (_S.REGISTERED, DeadlineReached): to(_S.ENDED, _S.REGISTERED),
    (_S.MATCHED, PrefillAdvanced): to(_S.MATCHED, _S.STREAMING, _S.WRITING, _S.READING),
    (_S.MATCHED, PrefillRestarted): to(_S.MATCHED),
    (_S.MATCHED, PrefillFinished): to(_S.WRITING, _S.READING),
    (_S.MATCHED, PrefillAborted): to(_S.ENDED),
    (_S.MATCHED, RegisterReceived): to(_S.MATCHED, _S.STREAMING, _S.ENDED),
    (_S.MATCHED, CancelReceived): to(_S.COMPUTING, _S.ENDED, _S.MATCHED),
    (_S.MATCHED, StatusAsked): to(_S.MATCHED),
    (_S.MATCHED, PeerLost): to(_S.COMPUTING),
    (_S.HELD, RegisterReceived): to(_S.WRITING, _S.READING, _S.ENDED, _S.HELD),
    (_S.HELD, CancelReceived): to(_S.HELD, _S.ENDED),
    (_S.HELD, StatusAsked): to(_S.HELD),
    (_S.HELD, DeadlineReached): to(_S.ENDED),
    (_S.STREAMING, PrefillAdvanced): to(_S.STREAMING, _S.WRITING),
    (_S.STREAMING, PrefillRestarted): to(_S.DRAINING),
    (_S.STREAMING, PrefillFinished): to(_S.WRITING),
    (_S.STREAMING, PrefillAborted): to(_S.DRAINING),
    (_S.STREAMING, WritesFailed): to(_S.COMPUTING),
    (_S.STREAMING, RegisterReceived): to(_S.STREAMING, _S.DRAINING),
    (_S.STREAMING, CancelReceived): to(_S.DRAINING, _S.STREAMING),
    (_S.STREAMING, StatusAsked): to(_S.STREAMING),
    (_S.STREAMING, PeerLost): to(_S.DRAINING),
    (_S.WRITING, PrefillRestarted): to(_S.DRAINING),
    (_S.WRITING, PrefillFinished): to(_S.WRITING),
    (_S.WRITING, PrefillAborted): to(_S.WRITING),
    (_S.WRITING, PrefillAdvanced): to(_S.WRITING),
    (_S.WRITING, WritesDone): to(_S.ENDED),
    (_S.WRITING, WritesFailed): to(_S.COMPUTING, _S.HELD),
    (_S.WRITING, RegisterReceived): to(_S.WRITING, _S.DRAINING),
    (_S.WRITING, CancelReceived): to(_S.DRAINING, _S.WRITING),
    (_S.WRITING, StatusAsked): to(_S.WRITING),
    (_S.WRITING, PeerLost): to(_S.DRAINING),
    (_S.READING, PrefillRestarted): to(_S.DRAINING),
    (_S.READING, PrefillFinished): to(_S.READING),
    (_S.READING, PrefillAborted): to(_S.READING),
    (_S.READING, PrefillAdvanced): to(_S.READING),
    (_S.READING, DoneReceived): to(_S.ENDED, _S.READING),
    (_S.READING, RegisterReceived): to(_S.READING, _S.DRAINING),
    (_S.READING, CancelReceived): to(_S.COMPUTING, _S.HELD, _S.ENDED, _S.READING),
    (_S.READING, StatusAsked): to(_S.READING),
    (_S.READING, PeerLost): to(_S.COMPUTING, _S.HELD),
    (_S.DRAINING, PrefillAdvanced): to(_S.DRAINING),
    (_S.DRAINING, PrefillRestarted): to(_S.DRAINING),
    (_S.DRAINING, PrefillFinished): to(_S.DRAINING),
    (_S.DRAINING, PrefillAborted): to(_S.DRAINING),
    (_S.DRAINING, WritesDone): to(*_ANYWHERE),
    (_S.DRAINING, WritesFailed): to(*_ANYWHERE),
    (_S.DRAINING, RegisterReceived): to(_S.DRAINING),
    (_S.DRAINING, CancelReceived): to(_S.DRAINING, *_ANYWHERE),
    (_S.DRAINING, DoneReceived): to(_S.DRAINING, *_ANYWHERE),
    (_S.DRAINING, StatusAsked): to(_S.DRAINING),
    (_S.DRAINING, PeerLost): to(_S.DRAINING, *_ANYWHERE),
    (_S.ENDED, PrefillAnnounced): to(_S.ENDED),
    (_S.ENDED, PrefillAdvanced): to(_S.ENDED),
    (_S.ENDED, PrefillRestarted): to(_S.ENDED),
    (_S.ENDED, PrefillFinished): to(_S.ENDED),
    (_S.ENDED, PrefillAborted): to(_S.ENDED),
    (_S.ENDED, RegisterReceived): to(_S.ENDED),
    (_S.ENDED, CancelReceived): to(_S.ENDED),
    (_S.ENDED, DoneReceived): to(_S.ENDED),
    (_S.ENDED, StatusAsked): to(_S.ENDED),
    (_S.ENDED, DeadlineReached): to(_S.ENDED),
    # A `Done` for a transfer that is not being read can only be a late copy.
    (_S.COMPUTING, DoneReceived): to(_S.COMPUTING),
    (_S.REGISTERED, DoneReceived): to(_S.REGISTERED),
    (_S.MATCHED, DoneReceived): to(_S.MATCHED),
    (_S.HELD, DoneReceived): to(_S.HELD),
    (_S.STREAMING, DoneReceived): to(_S.STREAMING),
    (_S.WRITING, DoneReceived): to(_S.WRITING),
}
