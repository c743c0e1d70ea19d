"""Which blocks of a consumer may be written to, so that no two transfers ever write to the same one."""

from kvberth.protocol.ids import PeerName, TransferKey

__all__ = ["Claims"]

_Claims = dict[PeerName, set[int]]


class Claims:
    """Blocks that live registrations name, by consumer: they are its own memory, and each belongs to one request.

    Of one transfer an older and a newer attempt may claim the same block: they are never written to at once.
    """

    def __init__(self) -> None:
        self._of_peer: _Claims = {}
        self._of_transfer: dict[TransferKey, _Claims] = {}

    def foreign(self, key: TransferKey, peer: PeerName, blocks: tuple[int, ...]) -> int | None:
        """One of these blocks that another transfer with this consumer has claimed; None if there is none."""
        claimed = self._of_peer.get(peer)
        if claimed is None or claimed.isdisjoint(blocks):
            return None
        own = self._of_transfer.get(key, {}).get(peer, set())
        return min(claimed.intersection(blocks) - own, default=None)

    def set(self, key: TransferKey, claims: list[tuple[PeerName, tuple[int, ...]]]) -> None:
        """What a transfer claims from now on, in place of what it had claimed before."""
        for peer, blocks in self._of_transfer.pop(key, {}).items():
            claimed = self._of_peer[peer]
            claimed -= blocks
            if not claimed:
                del self._of_peer[peer]
        own: _Claims = {}
        for peer, named in claims:
            if named:
                own.setdefault(peer, set()).update(named)
                self._of_peer.setdefault(peer, set()).update(named)
        if own:
            self._of_transfer[key] = own
