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
from kvberth.protocol.table import Table, to

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
    CONFIRMING = "confirming"
    CANCELLING = "cancelling"
    DRAINING = "draining"
    ENDED = "ended"


_S = ConsumerState


CONSUMER_TABLE: Table = {
    (_S.NEW, RequestWaiting): to(_S.WAITING, _S.DECLINING),
    (_S.NEW, RequestDeclined): to(_S.DECLINING),
    (_S.WAITING, PeerReady): to(_S.REGISTERED),
    (_S.WAITING, PeerRefused): to(_S.ENDED),
    (_S.WAITING, RequestAborted): to(_S.DECLINING),
    (_S.WAITING, DeadlineReached): to(_S.ENDED),
    # The same transfer comes to this worker again, before the producer has heard that it was not wanted.
    (_S.DECLINING, RequestWaiting): to(_S.WAITING, _S.DECLINING),
    (_S.DECLINING, RequestDeclined): to(_S.DECLINING),
    # vLLM tells of a rejection also when a client has left, after the request itself has been aborted.
    **{
        (state, RequestDeclined): to(state)
        for state in (
            _S.WAITING,
            _S.REGISTERED,
            _S.ACCEPTED,
            _S.RECEIVING,
            _S.READING,
            _S.CONFIRMING,
            _S.CANCELLING,
            _S.DRAINING,
        )
    },
    (_S.DECLINING, PeerReady): to(_S.ENDED),
    (_S.DECLINING, PeerRefused): to(_S.ENDED),
    (_S.DECLINING, RequestAborted): to(_S.DECLINING),
    (_S.DECLINING, DeadlineReached): to(_S.ENDED),
    # The producer forgot us, or was restarted, before it answered: register again.
    (_S.REGISTERED, PeerReady): to(_S.REGISTERED),
    (_S.REGISTERED, Accepted): to(_S.ACCEPTED),
    (_S.REGISTERED, Writing): to(_S.RECEIVING),
    (_S.REGISTERED, Located): to(_S.READING, _S.CANCELLING),
    (_S.REGISTERED, Ended): to(_S.ENDED),
    (_S.REGISTERED, RequestAborted): to(_S.CANCELLING),
    (_S.REGISTERED, DeadlineReached): to(_S.CANCELLING),
    (_S.REGISTERED, PeerLost): to(_S.ENDED),
    (_S.ACCEPTED, Accepted): to(_S.ACCEPTED),
    (_S.ACCEPTED, Writing): to(_S.RECEIVING),
    (_S.ACCEPTED, Located): to(_S.READING, _S.CANCELLING),
    (_S.ACCEPTED, Ended): to(_S.ENDED),
    (_S.ACCEPTED, RequestAborted): to(_S.CANCELLING),
    (_S.ACCEPTED, DeadlineReached): to(_S.CANCELLING),
    (_S.ACCEPTED, PeerLost): to(_S.ENDED),
    (_S.RECEIVING, Accepted): to(_S.RECEIVING),
    (_S.RECEIVING, Writing): to(_S.RECEIVING),
    (_S.RECEIVING, Ended): to(_S.ENDED),
    (_S.RECEIVING, RequestAborted): to(_S.CANCELLING),
    (_S.RECEIVING, DeadlineReached): to(_S.CANCELLING),
    (_S.RECEIVING, PeerLost): to(_S.ENDED),
    (_S.READING, Accepted): to(_S.READING),
    (_S.READING, Located): to(_S.READING),
    (_S.READING, ReadsDone): to(_S.CONFIRMING),
    (_S.READING, ReadsFailed): to(_S.ENDED),
    (_S.READING, Ended): to(_S.DRAINING),
    (_S.READING, RequestAborted): to(_S.DRAINING),
    (_S.READING, DeadlineReached): to(_S.DRAINING),
    (_S.READING, PeerLost): to(_S.DRAINING),
    (_S.CONFIRMING, Accepted): to(_S.CONFIRMING),
    (_S.CONFIRMING, Located): to(_S.CONFIRMING),
    (_S.CONFIRMING, Ended): to(_S.ENDED),
    (_S.CONFIRMING, RequestAborted): to(_S.ENDED),
    (_S.CONFIRMING, DeadlineReached): to(_S.ENDED),
    (_S.CONFIRMING, PeerLost): to(_S.ENDED),
    (_S.CANCELLING, Accepted): to(_S.CANCELLING),
    (_S.CANCELLING, Writing): to(_S.CANCELLING),
    (_S.CANCELLING, Located): to(_S.CANCELLING),
    (_S.CANCELLING, Ended): to(_S.ENDED),
    (_S.CANCELLING, Quiesced): to(_S.ENDED),
    (_S.CANCELLING, RequestAborted): to(_S.CANCELLING),
    (_S.CANCELLING, PeerLost): to(_S.ENDED),
    (_S.DRAINING, Accepted): to(_S.DRAINING),
    (_S.DRAINING, Located): to(_S.DRAINING),
    (_S.DRAINING, Ended): to(_S.DRAINING),
    (_S.DRAINING, ReadsDone): to(_S.ENDED),
    (_S.DRAINING, ReadsFailed): to(_S.ENDED),
    (_S.DRAINING, RequestAborted): to(_S.DRAINING),
    (_S.DRAINING, PeerLost): to(_S.DRAINING),
}
