"""Which transfers a peer's loss concerns."""

from kvberth.protocol.ids import PeerName, TransferKey

__all__ = ["KeysByPeer"]


class KeysByPeer:
    """Transfers by the peer that they are with. A peer without any is not known here."""

    def __init__(self) -> None:
        self._keys: dict[PeerName, set[TransferKey]] = {}

    def __contains__(self, peer: PeerName) -> bool:
        return peer in self._keys

    def of(self, peer: PeerName) -> list[TransferKey]:
        """The peer's transfers, in order."""
        return sorted(self._keys.get(peer, ()))

    def tie(self, peer: PeerName, key: TransferKey) -> None:
        """The peer's loss concerns this transfer from now on."""
        self._keys.setdefault(peer, set()).add(key)

    def untie(self, peer: PeerName | None, key: TransferKey) -> None:
        """It no longer does; nothing happens if it did not."""
        if peer is not None and (keys := self._keys.get(peer)) is not None:
            keys.discard(key)
            if not keys:
                del self._keys[peer]
