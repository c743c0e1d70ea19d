"""CURVE keys of engines and routers: the files that hold them, and who is accepted.

Knows nothing of messages and transfers. `mover` and `router` put the keys on their sockets.
"""

from kvberth.keys.certificate import Certificate, KeyFileError, KeyPair, PeerRole
from kvberth.keys.files import make_key_pair, read_certificate, read_key_pair, write_key_pair
from kvberth.keys.keyring import Keyring

__all__ = [
    "Certificate",
    "KeyFileError",
    "KeyPair",
    "Keyring",
    "PeerRole",
    "make_key_pair",
    "read_certificate",
    "read_key_pair",
    "write_key_pair",
]
