"""Whom we accept: the certificates in a directory, as they are now.

An operator adds a worker by putting its certificate there, and takes one out by removing it; nobody is restarted.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from kvberth.keys.certificate import Certificate, KeyFileError, KeyPair
from kvberth.keys.files import PUBLIC_SUFFIX, read_certificate

__all__ = ["Keyring"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""The directory is looked at no more often, however many strangers knock."""

_Snapshot = tuple[tuple[str, int, int, int], ...]


class Keyring:
    """Our own pair, and the certificates of accepted peers. Used by one thread.

    Args:
        own: who we are.
        peers_dir: holds `NAME.key` of each accepted peer; other files in it are not looked at.

    Raises:
        KeyFileError: there is no such directory, or one of its certificates cannot be used.
    """

    def __init__(self, own: KeyPair, peers_dir: Path) -> None:
        self.own = own
        self.peers_dir = peers_dir
        self._snapshot = _snapshot_of(peers_dir)
        self._by_key: dict[str, Certificate] = {}
        self._by_name: dict[str, Certificate] = {}
        self._take([read_certificate(peers_dir / name) for name, *_ in self._snapshot])
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Read the directory again if it has changed and the last look is a second old. Call it before asking.

        A file that cannot be used is not accepted, and logged; while the directory itself cannot be read, what was
        accepted stays so.
        """
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        try:
            snapshot = _snapshot_of(self.peers_dir)
        except KeyFileError as error:
            _log.error("kvberth: accepted keys stay as they are: %s", error)
            return
        if snapshot == self._snapshot:
            return
        self._snapshot = snapshot
        before = set(self._by_key.values())
        found = []
        for name, *_ in snapshot:
            try:
                found.append(read_certificate(self.peers_dir / name))
            except KeyFileError as error:
                _log.error("kvberth: a key is not accepted: %s", error)
        self._take(found)
        after = set(self._by_key.values())
        for what, changed in (("accepted", after - before), ("no longer accepted", before - after)):
            if changed:
                _log.info("kvberth: keys that are %s from now on: %s", what, _names(changed))

    def with_key(self, public_key: str) -> Certificate | None:
        """The accepted peer that has this key."""
        return self._by_key.get(public_key)

    def find(self, identity: str) -> Certificate | None:
        """The accepted peer with this public key, or else with this name."""
        return self._by_key.get(identity) or self._by_name.get(identity)

    def __len__(self) -> int:
        """How many peers are accepted."""
        return len(self._by_key)

    def _take(self, certificates: list[Certificate]) -> None:
        self._by_name = {each.name: each for each in certificates}
        self._by_key = {}
        for each in certificates:
            # A key under two names could have two roles: the first name in order counts.
            self._by_key.setdefault(each.public_key, each)


def _names(certificates: Iterable[Certificate]) -> str:
    return ", ".join(sorted(f"{each.name} ({each.role})" for each in certificates))


def _snapshot_of(directory: Path) -> _Snapshot:
    """What tells that a certificate has come, gone or changed. Files are followed to where links lead."""
    found = []
    try:
        for path in sorted(directory.iterdir()):
            if path.name.endswith(PUBLIC_SUFFIX) and path.is_file():
                status = path.stat()
                found.append((path.name, status.st_mtime_ns, status.st_size, status.st_ino))
    except OSError as error:
        raise KeyFileError(f"the directory of accepted keys, {directory}, cannot be read: {error.strerror}") from error
    return tuple(found)
