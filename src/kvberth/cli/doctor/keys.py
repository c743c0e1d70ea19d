"""Probes of the keys for the control channel, where any are to be used."""

from pathlib import Path

from kvberth.cli.doctor.check import Check, fail, ok, warn
from kvberth.keys import KeyFileError, PeerRole, read_certificate, read_key_pair
from kvberth.keys.files import PUBLIC_SUFFIX

__all__ = ["probe_key_file", "probe_peers"]

_MAKE = "kvberth keys new makes them; docs/security.md says which file goes where"


def probe_key_file(path: Path) -> Check:
    """A secret key that works, and that nobody else can read."""
    name = "control key"
    try:
        certificate = read_key_pair(path).certificate
    except KeyFileError as error:
        return fail(name, str(error), _MAKE)
    return ok(name, f"{certificate.name}, {_word(certificate.role)}")


def probe_peers(directory: Path) -> Check:
    """Certificates that all work. None at all is a directory that nobody has filled yet."""
    name = "accepted keys"
    try:
        paths = [path for path in sorted(directory.iterdir()) if path.name.endswith(PUBLIC_SUFFIX)]
        roles = [read_certificate(path).role for path in paths]
    except OSError as error:
        return fail(name, f"{directory}: {error.strerror}", _MAKE)
    except KeyFileError as error:
        return fail(name, str(error), _MAKE)
    if not roles:
        return warn(name, f"none in {directory}", "copy the .key file of each engine and router there")
    counts = [f"{roles.count(role)} {role}{'s' * (roles.count(role) != 1)}" for role in PeerRole]
    return ok(name, f"{' and '.join(counts)} in {directory}")


def _word(role: PeerRole) -> str:
    return "an engine" if role is PeerRole.ENGINE else "a router"
