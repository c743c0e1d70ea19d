"""What a peer is known by. Plain data."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Certificate", "KeyFileError", "KeyPair", "PeerRole", "check_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyFileError(Exception):
    """A key file or a directory of them that cannot be used; the text names it and says what to do."""


class PeerRole(StrEnum):
    """What a peer may ask of a prefill worker: an engine registers blocks, a router watches and gives up."""

    ENGINE = "engine"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The public half.

    Attributes:
        name: the file's name without its ending.
        public_key: Z85, 40 characters.
    """

    name: str
    role: PeerRole
    public_key: str


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves; the secret one is left out wherever this is printed."""

    certificate: Certificate
    secret_key: str = field(repr=False)


def check_name(name: str) -> None:
    """Raise `KeyFileError` if this cannot be the name of a certificate: it becomes a file's name and is logged."""
    if not _NAME.fullmatch(name):
        raise KeyFileError(
            f"{name!r} cannot be a key's name: up to 64 letters, digits, '.', '_' and '-', a letter or digit first"
        )
