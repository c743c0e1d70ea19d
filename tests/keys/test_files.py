"""Key files: what is written is what is read, and what cannot be used is refused with what to do."""

import os
import stat
from pathlib import Path

import pytest
import zmq.auth

from kvberth.keys import (
    KeyFileError,
    KeyPair,
    PeerRole,
    make_key_pair,
    read_certificate,
    read_key_pair,
    write_key_pair,
)


@pytest.fixture
def pair() -> KeyPair:
    return make_key_pair("decode-0", PeerRole.ENGINE)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("role", list(PeerRole))
def test_a_pair_survives_its_files(tmp_path, role):
    """Name, role and both keys; the public file has the public half only."""
    pair = make_key_pair("some.name-1", role)
    public, secret = write_key_pair(pair, tmp_path)
    assert (public.name, secret.name) == ("some.name-1.key", "some.name-1.key_secret")
    assert read_key_pair(secret) == pair
    assert read_certificate(public) == pair.certificate
    assert pair.secret_key not in public.read_text()


def test_zeromq_s_own_tools_read_them(tmp_path, pair):
    """They are its certificates."""
    public, secret = write_key_pair(pair, tmp_path)
    keys = (pair.certificate.public_key.encode(), pair.secret_key.encode())
    assert zmq.auth.load_certificate(secret) == keys
    assert zmq.auth.load_certificate(public) == (keys[0], None)


def test_secrets_are_their_owner_s_alone(tmp_path, pair):
    """Whatever the umask says; a directory that is made is private too."""
    before = os.umask(0)
    try:
        public, secret = write_key_pair(pair, tmp_path / "new")
    finally:
        os.umask(before)
    assert mode_of(secret) == 0o600
    assert mode_of(public) == 0o644
    assert mode_of(tmp_path / "new") == 0o700


def test_nothing_is_overwritten(tmp_path, pair):
    """Neither half, nor what a link leads to."""
    write_key_pair(pair, tmp_path)
    with pytest.raises(KeyFileError, match=r"decode-0.key exists"):
        write_key_pair(make_key_pair("decode-0", PeerRole.ENGINE), tmp_path)
    target = tmp_path / "target"
    (tmp_path / "linked.key_secret").symlink_to(target)
    with pytest.raises(KeyFileError, match="cannot be written"):
        write_key_pair(make_key_pair("linked", PeerRole.ENGINE), tmp_path)
    assert not target.exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_secret_that_others_can_use_is_refused(tmp_path, pair, monkeypatch, mode):
    """With its mode and what to do; the owner here is not root."""
    _, secret = write_key_pair(pair, tmp_path)
    secret.chmod(mode)
    status = os.stat_result([*secret.stat()[:4], 1000, *secret.stat()[5:]])
    monkeypatch.setattr(os, "fstat", lambda _: status)
    with pytest.raises(KeyFileError, match=rf"read by others \(mode {mode:04o}\); chmod 600"):
        read_key_pair(secret)


@pytest.mark.parametrize(("mode", "is_fine"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_root_may_share_a_secret_with_a_group(tmp_path, pair, monkeypatch, mode, is_fine):
    """As orchestrators do that mount secrets for a user who is not root."""
    _, secret = write_key_pair(pair, tmp_path)
    secret.chmod(mode)
    status = os.stat_result([*secret.stat()[:4], 0, *secret.stat()[5:]])
    monkeypatch.setattr(os, "fstat", lambda _: status)
    if is_fine:
        assert read_key_pair(secret) == pair
    else:
        with pytest.raises(KeyFileError, match="by others"):
            read_key_pair(secret)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 65, "a\nb"])
def test_names_that_are_no_files_are_refused(name):
    """They become names of files, and stand in logs."""
    with pytest.raises(KeyFileError, match="cannot be a key's name"):
        make_key_pair(name, PeerRole.ENGINE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text.replace("public-key", "other"), "no public-key"),
        (lambda text: text.replace("secret-key", "other"), "no secret-key"),
        (lambda text: text[:-6] + '"\n', "the secret-key is not 40 characters of Z85"),
        (lambda text: text.replace('public-key = "', 'public-key = "~')[:], "the public-key is not 40 characters"),
        (lambda text: text.replace('role = "engine"', 'role = "king"'), "role must be engine or router, not 'king'"),
        (lambda text: text.replace("role", "roll"), "role must be engine or router, not 'missing'"),
        (lambda _: "", "role must be"),
    ],
)
def test_a_file_that_is_no_key_is_refused(tmp_path, pair, change, text):
    """The message names file and fault."""
    _, secret = write_key_pair(pair, tmp_path)
    secret.write_text(change(secret.read_text()))
    with pytest.raises(KeyFileError, match=rf"{secret.name}.*{text}"):
        read_key_pair(secret)


def test_characters_outside_of_z85_are_refused(tmp_path, pair):
    """The length alone is not enough."""
    public, _ = write_key_pair(pair, tmp_path)
    public.write_text(public.read_text().replace(pair.certificate.public_key, "~" * 40))
    with pytest.raises(KeyFileError, match="40 characters of Z85"):
        read_certificate(public)


def test_halves_of_two_pairs_are_refused(tmp_path, pair):
    """Somebody has edited the file."""
    _, secret = write_key_pair(pair, tmp_path)
    other = make_key_pair("x", PeerRole.ENGINE).certificate.public_key
    secret.write_text(secret.read_text().replace(pair.certificate.public_key, other))
    with pytest.raises(KeyFileError, match="do not belong together"):
        read_key_pair(secret)


def test_a_secret_under_a_public_name_is_refused(tmp_path, pair):
    """It has been copied where it should not be."""
    _, secret = write_key_pair(pair, tmp_path / "own")
    copied = tmp_path / "decode-0.key"
    copied.write_text(secret.read_text())
    with pytest.raises(KeyFileError, match="holds a secret key"):
        read_certificate(copied)


def test_what_is_not_there_is_named(tmp_path):
    """A path that was mistyped."""
    with pytest.raises(KeyFileError, match=r"nowhere.key_secret: no such file; make a new pair"):
        read_key_pair(tmp_path / "nowhere.key_secret")
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_certificate(tmp_path)
    (tmp_path / "binary.key").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_certificate(tmp_path / "binary.key")


def test_secrets_are_not_printed(pair):
    """Whoever logs a pair logs its public half."""
    assert pair.secret_key not in repr(pair)
    assert pair.secret_key not in str(pair)
    assert pair.certificate.public_key in repr(pair)
