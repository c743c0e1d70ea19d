"""What goes over the control channel, and how it is put into bytes.

A frame is two bytes of protocol version, four of checksum (both big endian) and a msgpack map with a `type` tag. The
version is outside the map so that engines of different versions can still tell each other why they do not talk. The
checksum is the CRC-32 (as in zlib) of version and map: one wrong bit in a list of block ids would write a KV cache over
another request's, and TCP's own 16 bits let some pass. With CURVE keys nothing damaged arrives; not all have keys.
"""

import struct
import zlib

import msgspec

from kvberth.layout import Fingerprint, Region
from kvberth.protocol.ends import End, Reason
from kvberth.protocol.errors import MalformedMessage, VersionMismatch
from kvberth.protocol.ids import TransferKey, TransferMode
from kvberth.protocol.timeline import PrefillTimes

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Accepted",
    "Alive",
    "Cancel",
    "Done",
    "Ended",
    "EngineCard",
    "Heartbeat",
    "Hello",
    "HelloNeeded",
    "Incompatible",
    "Located",
    "Message",
    "Progress",
    "Quiesced",
    "Register",
    "Watch",
    "Welcome",
    "Writing",
    "decode",
    "encode",
    "sealed",
]

PROTOCOL_VERSION = 3
_FIRST_WITH_CHECKSUM = 3

MAX_FRAME_BYTES = 1024 * 1024
"""A registration of a million-token prompt in blocks of 16 is 0.3 MB, a heartbeat for 10,000 transfers 0.5 MB."""


class EngineCard(msgspec.Struct, frozen=True, kw_only=True):
    """All that a peer must know of one rank of an engine before bytes can move.

    Attributes:
        engine_id: vLLM's id of the engine.
        incarnation: differs at each start of the engine.
        rank: tensor-parallel rank.
        fingerprint: what must be equal on both sides.
        regions: where the KV memory lies.
        num_blocks: blocks in each region.
        agent_metadata: the transport's own card, opaque here.
    """

    engine_id: str
    incarnation: str
    rank: int
    fingerprint: Fingerprint
    regions: tuple[Region, ...]
    num_blocks: int
    agent_metadata: bytes

    @property
    def peer_name(self) -> str:
        """`engine_id/rank/incarnation`, the peer's name everywhere in the mover."""
        return f"{self.engine_id}/{self.rank}/{self.incarnation}"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Consumer to producer, first message of a connection.

    `session` counts the consumer's dialling: one that dials anew has given up on all that it had registered before. A
    connection that broke and was mended belongs to the same session, and nothing of it is given up.
    """

    card: EngineCard
    session: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Producer to consumer: the answer to a `Hello` that fits."""

    card: EngineCard


class Incompatible(msgspec.Struct, frozen=True, tag="incompatible"):
    """Producer to consumer: the answer to a `Hello` that does not fit."""

    field: str
    producer_value: str
    consumer_value: str


class HelloNeeded(msgspec.Struct, frozen=True, tag="hello_needed"):
    """Producer to consumer: I do not know you (any more); say hello first."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Consumer to producer once per interval, and back as an echo, which the consumer answers with `Alive`.

    `live` names the (transfer, attempt) pairs that the consumer waits for. It lets the producer answer anew what was
    lost on the way, and end what the consumer no longer wants. The producer's list is empty.

    `stamp` is the producer's clock when it sent this, in seconds; nobody else can read it. The consumer's is 0.
    """

    live: tuple[tuple[TransferKey, int], ...] = ()
    stamp: float = 0.0


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Consumer to producer, the answer to its `Heartbeat`: I heard you, and have not given up on you since.

    With the stamp that it answers the producer knows how old the news is, however long it was on the way.
    """

    stamp: float


class Register(msgspec.Struct, frozen=True, tag="register", kw_only=True):
    """Consumer to producer: my blocks for this transfer.

    Attributes:
        first_token: the first token that the consumer lacks; a whole number of blocks.
        num_tokens: tokens in the prompt.
        prompt_digest: of the prompt's token ids; the producer refuses another prompt's KV.
        block_size: the consumer's, in tokens.
        blocks: the consumer's block ids for tokens from `first_token` on. In pull they are empty.
    """

    key: TransferKey
    attempt: int
    mode: TransferMode
    first_token: int
    num_tokens: int
    prompt_digest: bytes
    block_size: int
    blocks: tuple[int, ...] = ()


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Producer to consumer: the registration stands."""

    key: TransferKey
    attempt: int


class Writing(msgspec.Struct, frozen=True, tag="writing"):
    """Producer to consumer: WRITEs into your blocks begin now; drive your transport until the end is known."""

    key: TransferKey
    attempt: int


class Located(msgspec.Struct, frozen=True, tag="located"):
    """Producer to consumer, in pull: READ these blocks of mine, the first being that of `first_token`.

    `block_size` is the producer's, in tokens.
    """

    key: TransferKey
    attempt: int
    blocks: tuple[int, ...]
    block_size: int
    times: PrefillTimes | None = None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Consumer to producer, in pull: I have read everything. `Ended` confirms that the blocks were whole until then."""

    key: TransferKey
    attempt: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Producer to consumer: how this attempt ended here. After it the producer touches none of its blocks.

    `num_bytes` and `num_descriptors` say what a push has moved, `times` when.
    """

    key: TransferKey
    attempt: int
    end: End
    reason: Reason = Reason.NONE
    detail: str = ""
    num_bytes: int = 0
    num_descriptors: int = 0
    times: PrefillTimes | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Consumer to producer: I no longer want this transfer; tell me when nothing of yours can touch my blocks."""

    key: TransferKey
    attempt: int
    reason: Reason


class Quiesced(msgspec.Struct, frozen=True, tag="quiesced"):
    """Producer to consumer, the answer to `Cancel`: nothing of mine is in flight for this attempt."""

    key: TransferKey
    attempt: int


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Router to producer: tell me how this prefill gets on, until the transfer is over. No `Hello` comes before it."""

    key: TransferKey


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Producer to router: how far a prefill is.

    Attributes:
        num_tokens: in the prompt; 0 while the request has not come.
        scheduled_tokens: that will have been computed after the step which has begun.
        done_tokens: whose KV is in memory.
        is_registered: whether a decode worker has registered.
        is_handed_over: a decode worker has all of the KV that it lacked; the last message of a transfer that completes.
    """

    key: TransferKey
    num_tokens: int
    scheduled_tokens: int
    done_tokens: int
    is_registered: bool
    is_handed_over: bool = False


Message = (
    Hello
    | Welcome
    | Incompatible
    | HelloNeeded
    | Heartbeat
    | Alive
    | Register
    | Accepted
    | Writing
    | Located
    | Done
    | Ended
    | Cancel
    | Quiesced
    | Watch
    | Progress
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


_VERSION = struct.Struct(">H")
_HEADER = struct.Struct(">HI")


def encode(message: Message) -> bytes:
    """The frame for a message."""
    return sealed(_encoder.encode(message))


def sealed(body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The frame around a msgpack map."""
    return _HEADER.pack(version, _checksum(version, body)) + body


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        MalformedMessage: the frame is too short, too long, damaged or not one of our messages.
    """
    if not _HEADER.size < len(frame) <= MAX_FRAME_BYTES:
        raise MalformedMessage(f"frame of {len(frame)} bytes; expected {_HEADER.size + 1} to {MAX_FRAME_BYTES}")
    version, checksum = _HEADER.unpack_from(frame)
    body = memoryview(frame)[_HEADER.size :]
    if version < _FIRST_WITH_CHECKSUM:
        raise VersionMismatch(PROTOCOL_VERSION, version)
    if checksum != _checksum(version, body):
        raise MalformedMessage(f"frame of {len(frame)} bytes is damaged: its checksum does not fit")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(PROTOCOL_VERSION, version)
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error
    except RecursionError as error:
        raise MalformedMessage("not a message: nested too deeply") from error


def _checksum(version: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(_VERSION.pack(version)))
