"""The handoff's rules without any I/O: ids, messages, and the life cycles of producer and consumer.

Nothing in this package reads a clock, opens a socket, starts a thread or imports a library of the engine: time is an
argument, events go in, actions come out. `kvberth.mover` is the driver that gives it sockets and memory.
"""

from kvberth.protocol.actions import (
    Action,
    EndRecord,
    ReleaseRequest,
    ReportReceived,
    SendMessage,
    StartRead,
    StartWrite,
    StopPosting,
)
from kvberth.protocol.consumer import Consumer
from kvberth.protocol.ends import End, Reason
from kvberth.protocol.errors import MalformedMessage, PeerError, ProtocolError, VersionMismatch
from kvberth.protocol.ids import TransferKey, TransferMode
from kvberth.protocol.messages import PROTOCOL_VERSION, EngineCard, Message, decode, encode
from kvberth.protocol.producer import Producer
from kvberth.protocol.timeline import Timeline
from kvberth.protocol.timing import Timing

__all__ = [
    "PROTOCOL_VERSION",
    "Action",
    "Consumer",
    "End",
    "EndRecord",
    "EngineCard",
    "MalformedMessage",
    "Message",
    "PeerError",
    "Producer",
    "ProtocolError",
    "Reason",
    "ReleaseRequest",
    "ReportReceived",
    "SendMessage",
    "StartRead",
    "StartWrite",
    "StopPosting",
    "Timeline",
    "Timing",
    "TransferKey",
    "TransferMode",
    "VersionMismatch",
    "decode",
    "encode",
]
