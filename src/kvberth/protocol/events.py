"""What happens to a transfer. The driver makes these from messages, from the engine and from the transport."""

from dataclasses import dataclass

from kvberth.protocol.ends import Reason
from kvberth.protocol.ids import PeerName, RequestId, TransferMode
from kvberth.protocol.messages import Accepted, Ended, Located, Quiesced, Register, Writing

__all__ = [
    "CancelReceived",
    "ConsumerEvent",
    "DeadlineReached",
    "DoneReceived",
    "PeerLost",
    "PeerReady",
    "PeerRefused",
    "PrefillAborted",
    "PrefillAdvanced",
    "PrefillAnnounced",
    "PrefillFinished",
    "PrefillRestarted",
    "ProducerEvent",
    "ReadsDone",
    "ReadsFailed",
    "RegisterReceived",
    "RequestAborted",
    "RequestDeclined",
    "RequestWaiting",
    "StatusAsked",
    "WritesDone",
    "WritesFailed",
]

# From the producer's engine.


@dataclass(frozen=True, slots=True)
class PrefillAnnounced:
    """The engine has received a request whose KV somebody will want."""

    request_id: RequestId
    num_tokens: int
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class PrefillAdvanced:
    """More of the prompt's KV is in memory.

    Attributes:
        first: the place of `blocks[0]` in the prompt: as many blocks came before.
        blocks: that are ready now; the last, partial one only when the prompt is complete.
        is_complete: whether these are the prompt's last.
    """

    first: int
    blocks: tuple[int, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class PrefillRestarted:
    """The engine has taken the request's blocks away (preemption) and will compute it anew, in others."""


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The engine is done: the prompt's KV is complete in these blocks, which it keeps until `ReleaseRequest`."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillAborted:
    """The request ended without complete KV; the engine keeps its blocks until `ReleaseRequest`."""


# From the consumer's engine.


@dataclass(frozen=True, slots=True)
class RequestWaiting:
    """A request has reserved blocks and waits for its KV.

    Attributes:
        blocks: block ids for the tokens from `first_token` on.
    """

    request_id: RequestId
    attempt: int
    mode: TransferMode
    first_token: int
    num_tokens: int
    prompt_digest: bytes
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestDeclined:
    """A request needs nothing from the producer, which may free its blocks; the engine does not wait."""

    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The waiting request is gone; its blocks stay reserved until `ReportReceived`."""


# From the transport and the clock.


@dataclass(frozen=True, slots=True)
class WritesDone:
    """All posted WRITEs of the transfer have landed."""

    num_bytes: int
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class WritesFailed:
    """A WRITE failed and none is in flight."""

    detail: str


@dataclass(frozen=True, slots=True)
class ReadsDone:
    """All posted READs of the transfer have landed."""

    num_bytes: int
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class ReadsFailed:
    """A READ failed and none is in flight."""

    detail: str


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """The transfer's deadline has passed.

    Attributes:
        last_look: producer: when its engine last took in new requests. An engine in the middle of a long step has not
            seen what arrived since the step began.
    """

    last_look: float


# From and about the peer.


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer is connected and fits."""

    peer: PeerName


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The peer does not fit or cannot be reached."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is gone: silent for too long, restarted, or its connection broke."""

    peer: PeerName
    detail: str


@dataclass(frozen=True, slots=True)
class RegisterReceived:
    """A `Register`, with what the driver found out about it.

    Attributes:
        invalid: why the blocks cannot be those of this peer; empty when they can.
    """

    peer: PeerName
    message: Register
    invalid: str = ""


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """The consumer gave up."""

    peer: PeerName
    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class DoneReceived:
    """The consumer has read everything."""

    peer: PeerName
    attempt: int


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """The consumer's heartbeat says that it waits for this attempt."""

    peer: PeerName
    attempt: int


ProducerEvent = (
    PrefillAnnounced
    | PrefillAdvanced
    | PrefillRestarted
    | PrefillFinished
    | PrefillAborted
    | WritesDone
    | WritesFailed
    | DeadlineReached
    | PeerLost
    | RegisterReceived
    | CancelReceived
    | DoneReceived
    | StatusAsked
)

ConsumerEvent = (
    RequestWaiting
    | RequestDeclined
    | RequestAborted
    | ReadsDone
    | ReadsFailed
    | DeadlineReached
    | PeerReady
    | PeerRefused
    | PeerLost
    | Accepted
    | Writing
    | Located
    | Ended
    | Quiesced
)
