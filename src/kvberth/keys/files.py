"""Key files, in the form of ZeroMQ's own certificates (ZPL), so that its tools read them.

NAME.key          public: name, role and public key; goes to all who shall accept NAME
NAME.key_secret   the same and the secret key, mode 0600; stays with NAME
"""

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import zmq

from kvberth.keys.certificate import Certificate, KeyFileError, KeyPair, PeerRole, check_name

__all__ = ["PUBLIC_SUFFIX", "SECRET_SUFFIX", "make_key_pair", "read_certificate", "read_key_pair", "write_key_pair"]

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"

_KEY_LENGTH = 40
_MAX_FILE_BYTES = 64 * 1024
_MAKE = "make a new pair with 'kvberth keys new'"


def make_key_pair(name: str, role: PeerRole) -> KeyPair:
    """A new pair.

    Raises:
        KeyFileError: the name cannot be a file's.
    """
    check_name(name)
    public, secret = zmq.curve_keypair()
    return KeyPair(Certificate(name, role, public.decode()), secret.decode())


def write_key_pair(pair: KeyPair, directory: Path) -> tuple[Path, Path]:
    """Write both files of a pair; a directory that does not exist is made, for its owner only.

    Returns:
        The public file and the secret one.

    Raises:
        KeyFileError: there is a pair of this name already, or the files cannot be written.
    """
    name = pair.certificate.name
    public, secret = directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (public, secret):
            if path.exists():
                raise KeyFileError(f"{path} exists; a key is replaced by removing both of its files first")
        _write_new(secret, _text(pair.certificate, pair.secret_key), 0o600)
        _write_new(public, _text(pair.certificate, None), 0o644)
    except OSError as error:
        raise KeyFileError(f"the keys of {name} cannot be written: {error}") from error
    return public, secret


def read_key_pair(path: Path) -> KeyPair:
    """The pair in a secret file.

    Raises:
        KeyFileError: no such file, one that others can read, or no pair of keys.
    """
    values = _read(path, is_secret=True)
    certificate = _certificate(path, values, SECRET_SUFFIX)
    secret = _key(path, values, "secret-key")
    if zmq.curve_public(secret.encode()).decode() != certificate.public_key:
        raise KeyFileError(f"{path}: the public and the secret key do not belong together; {_MAKE}")
    return KeyPair(certificate, secret)


def read_certificate(path: Path) -> Certificate:
    """The certificate in a public file.

    Raises:
        KeyFileError: no such file, no public key, or a secret one where none may be.
    """
    values = _read(path, is_secret=False)
    if "secret-key" in values:
        raise KeyFileError(f"{path} holds a secret key; only files made as NAME{PUBLIC_SUFFIX} are for others")
    return _certificate(path, values, PUBLIC_SUFFIX)


def _certificate(path: Path, values: dict[str, str], suffix: str) -> Certificate:
    name = path.name.removesuffix(suffix)
    try:
        check_name(name)
        role = PeerRole(values.get("role", ""))
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from error
    except ValueError as error:
        known = " or ".join(PeerRole)
        raise KeyFileError(
            f"{path}: its role must be {known}, not {values.get('role', 'missing')!r}; {_MAKE}"
        ) from error
    return Certificate(name, role, _key(path, values, "public-key"))


def _key(path: Path, values: dict[str, str], which: str) -> str:
    key = values.get(which)
    if key is None:
        raise KeyFileError(f"{path}: no {which}; is it a file of 'kvberth keys new'?")
    try:
        # Only a public key is derived by it; that it succeeds means that these are 32 bytes in Z85.
        is_key = len(key) == _KEY_LENGTH and bool(zmq.curve_public(key.encode("ascii")))
    except (UnicodeEncodeError, ValueError, zmq.ZMQError):
        is_key = False
    if not is_key:
        raise KeyFileError(f"{path}: the {which} is not {_KEY_LENGTH} characters of Z85; {_MAKE}")
    return key


def _read(path: Path, *, is_secret: bool) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            if is_secret:
                _check_private(path, os.fstat(file.fileno()))
            content = file.read(_MAX_FILE_BYTES).decode()
    except FileNotFoundError as error:
        raise KeyFileError(f"{path}: no such file; {_MAKE}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} cannot be read: {error}") from error
    values = {}
    for line in content.splitlines():
        name, is_value, value = line.partition("=")
        if is_value and not name.lstrip().startswith("#"):
            values[name.strip()] = value.strip().strip("\"'")
    return values


def _check_private(path: Path, status: os.stat_result) -> None:
    """A secret is its owner's alone; root may share it with a group, as systems that hand out secrets do."""
    forbidden = stat.S_IRWXO | (stat.S_IWGRP if status.st_uid == 0 else stat.S_IRWXG)
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileError(
            f"{path} can be read by others (mode {mode:04o}); chmod 600 it, or make a new pair if somebody may have"
        )


def _text(certificate: Certificate, secret_key: str | None) -> str:
    half = "SECRET: stays with its owner" if secret_key else "public: for all who shall accept it"
    lines = [
        f"#   CURVE certificate of kvberth, made {datetime.now(UTC):%Y-%m-%d}; {half}",
        "metadata",
        f'    name = "{certificate.name}"',
        f'    role = "{certificate.role}"',
        "curve",
        f'    public-key = "{certificate.public_key}"',
    ]
    if secret_key:
        lines.append(f'    secret-key = "{secret_key}"')
    return "\n".join(lines) + "\n"


def _write_new(path: Path, text: str, mode: int) -> None:
    """Nothing that exists is overwritten or followed, and the mode is right from the first moment on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
