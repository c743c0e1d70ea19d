"""A cluster is started and stopped as one. Engines are small processes here; `tests/e2e` has real ones."""

import itertools
import socket
import stat
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvberth.keys import Keyring, PeerRole, read_key_pair
from kvberth.launch import ClusterSettings, Connector, LaunchError, LocalCluster, Place, engine

FAKE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines are `fake_engine.py`; the list is how each one behaves, the first one's behaviour first."""
    behaviours: list[str] = []

    def command(kind: object, settings: object, *, port: int, **_: object) -> list[str]:
        return [sys.executable, str(FAKE), str(port), *([behaviours.pop(0)] if behaviours else [])]

    monkeypatch.setattr(engine, "engine_command", command)
    return behaviours


def settings(tmp_path: Path, undivided: int = 2) -> ClusterSettings:
    return ClusterSettings(model="m", prefill=0, decode=0, undivided=undivided, run_dir=tmp_path / "run")


def test_block_starts_and_stops_everything(fake_engines, tmp_path):
    """Each engine has a port and a log of its own; after the block none is left."""
    console = Console(record=True, width=100, force_terminal=False)
    with LocalCluster(settings(tmp_path), console) as cluster:
        one, two = cluster.undivided
        assert one.is_ready()
        assert two.is_ready()
        assert one.url != two.url
        assert "fake engine" in one.log.read_text()
        assert cluster.prefill == cluster.decode == []
        with pytest.raises(LaunchError, match="no router"):
            _ = cluster.router_url
    assert not one.is_alive
    assert not two.is_alive
    assert "undivided-1" in console.export_text()


def test_places_say_where_and_how_each_process_runs(monkeypatch, tmp_path):
    """Address, port, prefix, environment, settings and arguments of one; the other is as ever."""
    made: list[tuple[object, int]] = []

    def command(kind, settings, *, port, **_):
        made.append((settings, port))
        return [sys.executable, str(FAKE), str(port)]

    monkeypatch.setattr(engine, "engine_command", command)
    told = tmp_path / "told"
    place = Place(
        host="localhost",
        prefix=("sh", "-c", f'echo "$WHERE" "$@" > {told}; exec "$@"', "sh"),
        env={"WHERE": "elsewhere"},
        connector_config={"control_host": "10.0.0.4"},
        engine_args=("--deaf",),
    )
    cluster = LocalCluster(settings(tmp_path), places={"undivided-1": place})
    monkeypatch.setattr(cluster, "_await", lambda processes: None)
    with cluster:
        deadline = time.monotonic() + 10
        while not (told.exists() and told.read_text().endswith("--deaf\n")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (ours, _), (theirs, port) = made
        assert ours.connector_config == {}
        assert theirs.connector_config == {"control_host": "10.0.0.4"}
        assert cluster.undivided[1].url == f"http://localhost:{port}"
        assert told.read_text().split() == ["elsewhere", sys.executable, str(FAKE), str(port), "--deaf"]


def test_engine_that_dies_at_start_stops_the_others(fake_engines, tmp_path):
    """The error has the end of its log."""
    fake_engines += ["--deaf", "--die"]
    cluster = LocalCluster(settings(tmp_path))
    with pytest.raises(LaunchError, match=r"undivided-1 ended with status 3(.|\n)*no such model"), cluster:
        pass
    assert not any(each.is_alive for each in cluster.engines)


def test_taken_port_is_told_before_engines_start(tmp_path):
    """They take a minute, and the router would be last."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = LocalCluster(ClusterSettings(model="m", port=port, run_dir=tmp_path / "run"))
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is not free"), cluster:
            pass
    assert cluster.engines == []


def test_engine_that_dies_later_ends_the_wait(fake_engines, tmp_path):
    """`kvberth up` notices."""
    with LocalCluster(settings(tmp_path, undivided=1)) as cluster:
        cluster.undivided[0].kill()
        with pytest.raises(LaunchError, match="undivided-0 ended"):
            cluster.wait()


def test_error_in_the_block_stops_everything(fake_engines, tmp_path):
    """A test that fails leaves no engine behind."""
    with pytest.raises(ZeroDivisionError), LocalCluster(settings(tmp_path, undivided=1)) as cluster:
        _ = 1 / 0
    assert not cluster.undivided[0].is_alive


@pytest.mark.parametrize(
    ("connector", "listening"),
    [
        (Connector.KVBERTH, {"prefill-0", "prefill-1"}),
        (Connector.VLLM, {"prefill-0", "prefill-1", "decode-0", "decode-1"}),
    ],
)
def test_control_channels_have_ports_of_their_own(monkeypatch, tmp_path, connector, listening):
    """Decode workers listen as well with vLLM's connectors; each engine's ranks have eight ports in a row."""
    ports: dict[str, int] = {}
    in_environment: list[int] = []

    def command(kind, settings, *, port, control_port, **_):
        ports[f"{kind}-{sum(name.startswith(kind) for name in ports)}"] = control_port
        return [sys.executable, str(FAKE), str(port), "--die"]

    def environment(*_, control_port, **__):
        in_environment.append(control_port)
        return {}

    monkeypatch.setattr(engine, "engine_command", command)
    monkeypatch.setattr(engine, "engine_environment", environment)
    settings = ClusterSettings(
        model="small", emulate=True, prefill=2, decode=2, undivided=1, connector=connector, run_dir=tmp_path / "run"
    )
    with pytest.raises(LaunchError), LocalCluster(settings):
        pass
    assert in_environment == list(ports.values())
    assert {name for name, port in ports.items() if port} == listening
    taken = sorted(port for port in ports.values() if port)
    assert all(upper - lower >= 8 for lower, upper in itertools.pairwise(taken))


def test_each_process_of_a_cluster_has_a_key_of_its_own(monkeypatch, tmp_path):
    """All of them made before the first engine starts, in a directory for us alone, and gone with the cluster."""
    seen: list[Path] = []

    def command(kind, settings, *, port, key_file, **_):
        if key_file is not None:
            seen.append(key_file)
            assert read_key_pair(key_file).certificate.role is PeerRole.ENGINE
            assert len(Keyring(read_key_pair(key_file), key_file.parent)) == 4
            assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
        return [sys.executable, str(FAKE), str(port), "--die"]

    monkeypatch.setattr(engine, "engine_command", command)
    settings = ClusterSettings(model="m", prefill=1, decode=2, undivided=1, run_dir=tmp_path / "run")
    with pytest.raises(LaunchError), LocalCluster(settings):
        pass
    assert [path.name for path in seen] == ["prefill-0.key_secret", "decode-0.key_secret", "decode-1.key_secret"]
    assert not seen[0].parent.exists()


@pytest.mark.parametrize("changes", [{"authenticate": False}, {"connector": Connector.VLLM, "emulate": True}])
def test_a_cluster_may_have_no_keys(changes, tmp_path):
    """When nobody wants them, and with connectors that know none."""
    cluster = LocalCluster(ClusterSettings(model="m", run_dir=tmp_path, **changes))
    assert cluster.key_file("decode-9") is None
