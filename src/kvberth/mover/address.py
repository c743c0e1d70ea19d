"""Where a producer's control channel is, and who must be found there."""

from dataclasses import dataclass

__all__ = ["Address", "NotAccepted"]


class NotAccepted(Exception):
    """A producer that may not be dialled; the text says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """One rank's control channel.

    Attributes:
        endpoint: `host:port`.
        identity: the public key that the producer must have, or at first the name of its certificate; empty where the
            control channel is not authenticated. It comes from whoever sent the request, and is believed only if that
            key is among the accepted ones.
    """

    endpoint: str
    identity: str = ""

    def __str__(self) -> str:
        return self.endpoint
