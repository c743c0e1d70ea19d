"""What the doctor says of keys."""

from kvberth.cli.doctor import Status
from kvberth.cli.doctor.keys import probe_key_file, probe_peers
from kvberth.keys import PeerRole, make_key_pair, write_key_pair


def test_a_key_that_works_is_named(tmp_path):
    """With its role, since a router's is of no use to an engine."""
    _, secret = write_key_pair(make_key_pair("r", PeerRole.ROUTER), tmp_path)
    assert probe_key_file(secret).found == "r, a router"
    secret.chmod(0o666)
    check = probe_key_file(secret)
    assert (check.status, "read by others" in check.found) == (Status.FAIL, True)


def test_accepted_keys_are_counted(tmp_path):
    """None is a warning; one that cannot be used is a failure, as at an engine's start."""
    assert probe_peers(tmp_path).status is Status.WARN
    for name, role in (("a", PeerRole.ENGINE), ("b", PeerRole.ENGINE), ("r", PeerRole.ROUTER)):
        write_key_pair(make_key_pair(name, role), tmp_path)
    assert probe_peers(tmp_path).found == f"2 engines and 1 router in {tmp_path}"
    (tmp_path / "a.key").write_text("")
    assert probe_peers(tmp_path).status is Status.FAIL
    assert probe_peers(tmp_path / "nowhere").status is Status.FAIL


def test_the_doctor_looks_at_keys_that_it_is_given(kvberth_command, tmp_path, monkeypatch):
    """Beside all the rest."""
    monkeypatch.setattr("kvberth.cli.doctor.command._probes", list)
    flags = ["--control-key-file", tmp_path / "none.key_secret", "--control-peers-dir", tmp_path]
    result = kvberth_command("doctor", *flags)
    assert result.exit_code == 1
    assert "control key" in result.stdout
    assert "accepted keys" in result.stdout
    assert kvberth_command("doctor").exit_code == 0
