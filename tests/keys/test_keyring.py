"""Who is accepted: what stands in the directory, and what stands there later."""

import logging
from pathlib import Path

import pytest

from kvberth.keys import Certificate, KeyFileError, Keyring, PeerRole, make_key_pair, write_key_pair

OWN = make_key_pair("own", PeerRole.ENGINE)


def add(directory: Path, name: str, role: PeerRole = PeerRole.ENGINE) -> Certificate:
    pair = make_key_pair(name, role)
    write_key_pair(pair, directory)
    return pair.certificate


def test_peers_are_found_by_key_and_by_name(tmp_path):
    """Secret files beside the public ones are not looked at."""
    one, router = add(tmp_path, "one"), add(tmp_path, "router", PeerRole.ROUTER)
    (tmp_path / "one.key_secret").chmod(0o644)
    keyring = Keyring(OWN, tmp_path)
    assert len(keyring) == 2
    assert keyring.with_key(one.public_key) == keyring.find("one") == keyring.find(one.public_key) == one
    assert keyring.find("router") == router
    assert keyring.find("two") is keyring.with_key("one") is keyring.find("") is None


def test_a_new_certificate_is_accepted_and_a_removed_one_is_not(tmp_path):
    """Within a second, and the directory is read no more often."""
    one = add(tmp_path, "one")
    keyring = Keyring(OWN, tmp_path)
    keyring.look(100.0)
    two = add(tmp_path, "two")
    (tmp_path / "one.key").unlink()
    keyring.look(100.9)
    assert keyring.find("two") is None
    keyring.look(101.0)
    assert keyring.with_key(two.public_key) == two
    assert keyring.with_key(one.public_key) is None


def test_a_replaced_certificate_counts(tmp_path):
    """A name with another key is another peer."""
    old = add(tmp_path, "one")
    keyring = Keyring(OWN, tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    new = add(tmp_path, "one")
    keyring.look(100.0)
    assert keyring.with_key(old.public_key) is None
    assert keyring.find("one") == new


def test_a_bad_file_is_an_error_at_start_and_skipped_later(tmp_path, caplog):
    """At start somebody is there to put it right; later the others must go on."""
    one = add(tmp_path, "one")
    keyring = Keyring(OWN, tmp_path)
    (tmp_path / "bad.key").write_text("rubbish")
    two = add(tmp_path, "two")
    with pytest.raises(KeyFileError, match=r"bad\.key"):
        Keyring(OWN, tmp_path)
    with caplog.at_level(logging.INFO):
        keyring.look(100.0)
    assert {keyring.find("one"), keyring.find("two")} == {one, two}
    assert "bad.key" in caplog.text
    assert "accepted from now on: two (engine)" in caplog.text


def test_a_directory_that_vanishes_changes_nothing(tmp_path, caplog):
    """A network disk that is away for a moment throws nobody out; at start it is an error."""
    directory = tmp_path / "keys"
    one = add(directory, "one")
    keyring = Keyring(OWN, directory)
    directory.rename(tmp_path / "elsewhere")
    keyring.look(100.0)
    assert keyring.find("one") == one
    assert "stay as they are" in caplog.text
    with pytest.raises(KeyFileError, match=r"keys, cannot be read: No such file"):
        Keyring(OWN, directory)


def test_a_key_under_two_names_has_one_role(tmp_path):
    """The first in order: a copy does not make an engine of a router."""
    router = add(tmp_path, "a-router", PeerRole.ROUTER)
    text = (tmp_path / "a-router.key").read_text()
    (tmp_path / "b-engine.key").write_text(text.replace('"router"', '"engine"'))
    assert Keyring(OWN, tmp_path).with_key(router.public_key) == router
