"""Errors of the protocol; whose fault it was is in the class."""

__all__ = ["MalformedMessage", "PeerError", "ProtocolError", "UnexpectedEvent", "VersionMismatch"]


class ProtocolError(Exception):
    """Base of everything this package raises."""


class UnexpectedEvent(ProtocolError):
    """Our own fault: an event that the state's row in the table does not have."""


class PeerError(ProtocolError):
    """The peer's fault: what it sent cannot be used."""


class MalformedMessage(PeerError):
    """A frame that does not decode to a known message."""


class VersionMismatch(PeerError):
    """A frame of another protocol version.

    Attributes:
        theirs: the version in the frame's header.
    """

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"protocol version differs: ours {ours}, theirs {theirs}; run the same kvberth on both engines"
        )
        self.theirs = theirs
