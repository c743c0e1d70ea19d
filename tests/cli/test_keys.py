"""`kvberth keys`: keys are made once, shown without secrets, and what is wrong with them is said."""

import json

import pytest

from kvberth.cli.options import PeerRole as RoleChoice
from kvberth.keys import PeerRole, read_certificate, read_key_pair


def test_roles_are_those_of_the_keys():
    """The command repeats them, so that it starts fast."""
    assert {each.name: each.value for each in RoleChoice} == {each.name: each.value for each in PeerRole}


@pytest.mark.parametrize(("flags", "role"), [([], PeerRole.ENGINE), (["--role", "router"], PeerRole.ROUTER)])
def test_new_makes_a_pair_per_name(kvberth_command, tmp_path, flags, role):
    """And says where they are; nothing secret is printed."""
    result = kvberth_command("keys", "new", "one", "two", *flags, "--dir", tmp_path / "keys")
    assert result.exit_code == 0
    for name in ("one", "two"):
        pair = read_key_pair(tmp_path / "keys" / f"{name}.key_secret")
        assert read_certificate(tmp_path / "keys" / f"{name}.key") == pair.certificate
        assert pair.certificate.role is role
        assert pair.secret_key not in result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["one", "two"]


def test_new_overwrites_nothing(kvberth_command, tmp_path):
    """The second time is a failure, and the first pair is what it was."""
    kvberth_command("keys", "new", "one", "--dir", tmp_path)
    before = (tmp_path / "one.key_secret").read_text()
    result = kvberth_command("keys", "new", "one", "--dir", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "one.key exists" in result.stderr
    assert (tmp_path / "one.key_secret").read_text() == before


def test_new_makes_none_of_them_if_one_name_is_bad(kvberth_command, tmp_path):
    """A bad argument, and nothing half done."""
    result = kvberth_command("keys", "new", "one", "../two", "--dir", tmp_path / "keys")
    assert result.exit_code == 2
    assert "'../two' cannot be a key's name" in result.stderr
    assert not (tmp_path / "keys").exists()


def test_list_shows_whose_keys_are_there(kvberth_command, tmp_path):
    """Public halves, and whether the secret one lies beside them."""
    kvberth_command("keys", "new", "one", "--dir", tmp_path)
    kvberth_command("keys", "new", "two", "--role", "router", "--dir", tmp_path)
    (tmp_path / "two.key_secret").unlink()
    rows = json.loads(kvberth_command("keys", "list", "--dir", tmp_path, "--json").stdout)
    assert rows["problems"] == []
    assert [(row["name"], row["role"], row["has_secret"]) for row in rows["keys"]] == [
        ("one", "engine", True),
        ("two", "router", False),
    ]
    assert rows["keys"][0]["public_key"] == read_certificate(tmp_path / "one.key").public_key
    text = kvberth_command("keys", "list", "--dir", tmp_path)
    assert read_key_pair(tmp_path / "one.key_secret").secret_key not in text.output
    assert [line.split()[:2] for line in text.stdout.splitlines()] == [["one", "engine"], ["two", "router"]]


def test_list_fails_on_what_cannot_be_used(kvberth_command, tmp_path):
    """A file that others can write, one that is none, and halves that have been mixed up."""
    kvberth_command("keys", "new", "one", "two", "--dir", tmp_path)
    (tmp_path / "bad.key").write_text("rubbish")
    (tmp_path / "one.key").write_text((tmp_path / "two.key").read_text())
    (tmp_path / "two.key_secret").chmod(0o666)
    result = kvberth_command("keys", "list", "--dir", tmp_path)
    assert result.exit_code == 1
    for text in ("bad.key", "one.key_secret is not the secret half of one.key", "two.key_secret can be read by others"):
        assert text in result.stderr
    assert kvberth_command("keys", "list", "--dir", tmp_path / "nowhere").exit_code == 2
