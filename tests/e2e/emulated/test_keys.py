"""A cluster whose engines and router prove who they are, and those who are not among them."""

from pathlib import Path

import httpx
import pytest
import zmq
from tests.e2e.client import assert_nothing_left, eventually
from tests.e2e.conftest import decode_worker_beside
from tests.e2e.emulated.test_cluster import MODEL, counter, prompts, settings
from tests.e2e.legs import Legs, told
from tests.mover.rig import Engine

from kvberth.keys import PeerRole, make_key_pair, read_key_pair, write_key_pair
from kvberth.launch import LocalCluster
from kvberth.launch.metrics import EngineMetrics
from kvberth.launch.process import ManagedProcess
from kvberth.protocol import Reason, TransferKey, encode
from kvberth.protocol.messages import Cancel, Hello, Watch
from kvberth.router.engines import Role, parse_engine_info
from kvberth.transport import MemoryFabric


@pytest.fixture
def cluster(pool) -> LocalCluster:
    return pool.get(settings())


def keys_dir(cluster: LocalCluster) -> Path:
    """Of all its processes."""
    key_file = cluster.prefill[0].key_file
    assert key_file is not None
    return key_file.parent


def metrics_of(process: ManagedProcess) -> str:
    return httpx.get(f"{process.url}/metrics", timeout=10).text


def test_a_decode_worker_is_added_with_its_key_alone(cluster, tmp_path):
    """Nobody is restarted: its certificate is put where the prefill worker looks, and it is served by push and pull."""
    (prompt,) = prompts([1000])
    with Legs(MODEL, cluster.prefill[0]) as legs, decode_worker_beside(cluster, tmp_path) as added:
        expected = legs.ask(added, prompt)["choices"][0]["text"]
        for mode in ("push", "pull"):
            answer = legs.in_turn(added, prompt, f"added-{mode}", transfer_mode=mode)
            assert told(answer)["ok"]
            assert answer["choices"][0]["text"] == expected
    assert_nothing_left(cluster)
    assert counter(cluster, "corruptions") == 0


def test_a_decode_worker_without_an_accepted_key_gets_nothing(cluster, tmp_path):
    """It has a key, and accepts everybody; the prefill worker does not accept it. It computes the prompt by itself."""
    _, own = write_key_pair(make_key_pair("decode-0", PeerRole.ENGINE), tmp_path)
    theirs = keys_dir(cluster)
    for path in theirs.glob("prefill-*.key"):
        (tmp_path / path.name).write_text(path.read_text())
    config = {"control_key_file": str(own), "control_peers_dir": str(tmp_path)}
    (prompt,) = prompts([1000])
    with (
        Legs(MODEL, cluster.prefill[0]) as legs,
        decode_worker_beside(cluster, tmp_path, connector_config=config) as stranger,
    ):
        expected = legs.ask(cluster.decode[0], prompt)["choices"][0]["text"]
        answer = legs.in_turn(stranger, prompt, "refused")
        assert (told(answer)["ok"], told(answer)["reason"]) == (False, "not_authenticated")
        assert answer["choices"][0]["text"] == expected
        assert EngineMetrics(stranger.url).value("kvberth:transfer_bytes_total") == 0
        # The one whose name it has is served all the same.
        answer = legs.in_turn(cluster.decode[0], prompt, "served")
        assert told(answer)["ok"]
    eventually(lambda: "refused a peer at" in cluster.prefill[0].log.read_text(), 5, "P has said so")
    assert_nothing_left(cluster, 40)  # P keeps the blocks that nobody may ask for until their lease ends


def test_a_stranger_is_not_answered(cluster):
    """Who speaks the protocol, but has no key, hears nothing from a prefill worker."""
    info = parse_engine_info(metrics_of(cluster.prefill[0]), Role.PREFILL)
    assert info.public_key
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{info.control_host}:{info.control_port}")
        card = Engine("X", MemoryFabric()).core._consuming._card
        for message in (Hello(card, 1), Watch(TransferKey("t")), Cancel(TransferKey("t"), 0, Reason.NOT_NEEDED)):
            socket.send(encode(message))
        assert not socket.poll(1000)


def test_secrets_are_in_no_log_and_no_metric(cluster):
    """Nor in any command line; the public keys are."""
    secrets = {read_key_pair(path).secret_key for path in keys_dir(cluster).glob("*secret")}
    assert len(secrets) >= 3
    processes = [*cluster.engines, cluster.router]
    shown = [process.log.read_text() for process in processes]
    shown += [metrics_of(process) for process in processes]
    shown += [" ".join(each.cmdline()) for process in processes for each in process.family]
    assert not any(secret in text for secret in secrets for text in shown)
    assert "the control channel's key is prefill-0" in cluster.prefill[0].log.read_text()
