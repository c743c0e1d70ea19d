"""The states of a transfer on D, and the table of what can happen in them."""

from enum import StrEnum

from kvberth.protocol.events import (
    DeadlineReached,
    PeerLost,
    PeerReady,
    PeerRefused,
    ReadsDone,
    ReadsFailed,
    RequestAborted,
    RequestDeclined,
    RequestWaiting,
)
from kvberth.protocol.messages import Accepted, Ended, Located, Quiesced, Writing
from kvberth.protocol.table import Table

__all__ = ["CONSUMER_TABLE", "ConsumerState"]


class ConsumerState(StrEnum):
    """Where a transfer stands on D."""

    NEW = "new"
    WAITING = "waiting"
    DECLINING = "declining"
    REGISTERED = "registered"
    ACCEPTED = "accepted"
    RECEIVING = "receiving"
    READING = "reading"
    CANCELLING = "cancelling"
    DRAINING = "draining"
    ENDED = "ended"


_S = ConsumerState


def _to(*states: ConsumerState) -> frozenset[StrEnum]:
    return frozenset(states)


CONSUMER_TABLE: Table = {
    (_S.NEW, RequestWaiting): _to(_S.WAITING),
    (_S.NEW, RequestDeclined): _to(_S.DECLINING),
    (_S.WAITING, PeerReady): _to(_S.REGISTERED),
    (_S.WAITING, PeerRefused): _to(_S.ENDED),
    (_S.WAITING, RequestAborted): _to(_S.DECLINING),
    (_S.WAITING, DeadlineReached): _to(_S.ENDED),
    # The same transfer comes to this worker again, before the producer has heard that it was not wanted.
    (_S.DECLINING, RequestWaiting): _to(_S.WAITING),
    (_S.DECLINING, RequestDeclined): _to(_S.DECLINING),
    # vLLM tells of a rejection also when a client has left, after the request itself has been aborted.
    **{
        (state, RequestDeclined): _to(state)
        for state in (
            _S.WAITING,
            _S.REGISTERED,
            _S.ACCEPTED,
            _S.RECEIVING,
            _S.READING,
            _S.CANCELLING,
            _S.DRAINING,
        )
    },
    (_S.DECLINING, PeerReady): _to(_S.ENDED),
    (_S.DECLINING, PeerRefused): _to(_S.ENDED),
    (_S.DECLINING, RequestAborted): _to(_S.DECLINING),
    (_S.DECLINING, DeadlineReached): _to(_S.ENDED),
    # The producer forgot us, or was restarted, before it answered: register again.
    (_S.REGISTERED, PeerReady): _to(_S.REGISTERED),
    (_S.REGISTERED, Accepted): _to(_S.ACCEPTED),
    (_S.REGISTERED, Writing): _to(_S.RECEIVING),
    (_S.REGISTERED, Located): _to(_S.READING, _S.CANCELLING),
    (_S.REGISTERED, Ended): _to(_S.ENDED),
    (_S.REGISTERED, RequestAborted): _to(_S.CANCELLING),
    (_S.REGISTERED, DeadlineReached): _to(_S.CANCELLING),
    (_S.REGISTERED, PeerLost): _to(_S.ENDED),
    (_S.ACCEPTED, Accepted): _to(_S.ACCEPTED),
    (_S.ACCEPTED, Writing): _to(_S.RECEIVING),
    (_S.ACCEPTED, Located): _to(_S.READING, _S.CANCELLING),
    (_S.ACCEPTED, Ended): _to(_S.ENDED),
    (_S.ACCEPTED, RequestAborted): _to(_S.CANCELLING),
    (_S.ACCEPTED, DeadlineReached): _to(_S.CANCELLING),
    (_S.ACCEPTED, PeerLost): _to(_S.ENDED),
    (_S.RECEIVING, Accepted): _to(_S.RECEIVING),
    (_S.RECEIVING, Writing): _to(_S.RECEIVING),
    (_S.RECEIVING, Ended): _to(_S.ENDED),
    (_S.RECEIVING, RequestAborted): _to(_S.CANCELLING),
    (_S.RECEIVING, DeadlineReached): _to(_S.CANCELLING),
    (_S.RECEIVING, PeerLost): _to(_S.ENDED),
    (_S.READING, Accepted): _to(_S.READING),
    (_S.READING, Located): _to(_S.READING),
    (_S.READING, ReadsDone): _to(_S.ENDED),
    (_S.READING, ReadsFailed): _to(_S.ENDED),
    (_S.READING, Ended): _to(_S.DRAINING),
    (_S.READING, RequestAborted): _to(_S.DRAINING),
    (_S.READING, DeadlineReached): _to(_S.DRAINING),
    (_S.READING, PeerLost): _to(_S.DRAINING),
    (_S.CANCELLING, Accepted): _to(_S.CANCELLING),
    (_S.CANCELLING, Writing): _to(_S.CANCELLING),
    (_S.CANCELLING, Located): _to(_S.CANCELLING),
    (_S.CANCELLING, Ended): _to(_S.ENDED),
    (_S.CANCELLING, Quiesced): _to(_S.ENDED),
    (_S.CANCELLING, RequestAborted): _to(_S.CANCELLING),
    (_S.CANCELLING, PeerLost): _to(_S.ENDED),
    (_S.DRAINING, Accepted): _to(_S.DRAINING),
    (_S.DRAINING, Located): _to(_S.DRAINING),
    (_S.DRAINING, Ended): _to(_S.DRAINING),
    (_S.DRAINING, ReadsDone): _to(_S.ENDED),
    (_S.DRAINING, ReadsFailed): _to(_S.ENDED),
    (_S.DRAINING, RequestAborted): _to(_S.DRAINING),
    (_S.DRAINING, PeerLost): _to(_S.DRAINING),
}
