"""The other engines, as one rank sees them: those it dialled and those that dialled it."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from kvberth.mover.address import Address
from kvberth.protocol import EngineCard, TransferKey
from kvberth.protocol.ids import PeerName

__all__ = ["Client", "Link", "LinkState", "name_of_peer"]


def name_of_peer(card: EngineCard, public_key: str) -> PeerName:
    """No engine can take another one's place: whatever it calls itself, its key is part of its name here."""
    return PeerName(f"{card.peer_name}@{public_key}" if public_key else card.peer_name)


class LinkState(StrEnum):
    """Whether a dialled producer can be used."""

    GREETING = "greeting"
    READY = "ready"


@dataclass(slots=True)
class Link:
    """Consumer's end: one producer rank that we dialled.

    Attributes:
        address: of its control channel.
        session: how many were dialled before.
        waiting: transfers that wait for it to be ready.
        was_cut_short: somebody at its address has closed a connection before either side had proved who it is.
        last_heard: when its last message came, or when we began to listen.
    """

    address: Address
    session: int
    opened_at: float
    last_heard: float
    state: LinkState = LinkState.GREETING
    card: EngineCard | None = None
    waiting: list[TransferKey] = field(default_factory=list)
    next_heartbeat: float = 0.0
    was_cut_short: bool = False

    @property
    def peer(self) -> PeerName | None:
        """The producer's name, once it has answered."""
        return self.name_of(self.card) if self.card else None

    def name_of(self, card: EngineCard) -> PeerName:
        """What we call an engine that says so of itself: behind its own names stands the key that it has proved."""
        return name_of_peer(card, self.address.identity)


@dataclass(slots=True)
class Client:
    """Producer's end: one consumer rank that dialled us.

    Attributes:
        peer: its name here (see `name_of_peer`).
        route: where the control channel finds it.
        key: the public key that it has proved to have; empty where the control channel is not authenticated.
        agent: its name at the transport.
        session: of its dialling; a higher one has given up on all that went before.
        live_since: when it began to wait for something of ours, after a time in which it did not.
        proved_at: the newest moment of our clock that it has answered: it was there then.
        gone_since: when its connection was found to be broken; None while it stands.
    """

    peer: PeerName
    route: bytes
    card: EngineCard
    key: str
    agent: str
    session: int
    live_since: float
    proved_at: float = -inf
    gone_since: float | None = None

    @property
    def silent_since(self) -> float:
        """Since when it owes us a sign of life, if it waits for anything."""
        return max(self.live_since, self.proved_at)

    def answered(self, stamp: float, now: float) -> None:
        """It has answered what we sent at `stamp`; it cannot answer what we have not sent yet."""
        if self.proved_at < stamp <= now:
            self.proved_at = stamp
