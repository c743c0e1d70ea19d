"""Two movers with keys, and somebody on the same host who has none that is accepted."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

pytest.importorskip("kvberth.transport.nixl", reason="NIXL is not installed", exc_type=ImportError)

from tests.mover.rig import Engine
from tests.mover.test_two_processes import BOTH, Consumer, Peer, free_port

from kvberth.keys import KeyPair, Keyring, PeerRole, make_key_pair, read_certificate, read_key_pair, write_key_pair
from kvberth.protocol import Reason, TransferKey, TransferMode, encode
from kvberth.protocol.messages import Cancel, Hello, Register, Watch
from kvberth.transport import MemoryFabric

pytestmark = pytest.mark.nixl


def make_keys(directory: Path, name: str, role: PeerRole = PeerRole.ENGINE) -> KeyPair:
    pair = make_key_pair(name, role)
    write_key_pair(pair, directory)
    return pair


@pytest.fixture(scope="module")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """P, D and a router, who accept each other."""
    directory = tmp_path_factory.mktemp("keys")
    for name in ("P", "D"):
        make_keys(directory, name)
    make_keys(directory, "router", PeerRole.ROUTER)
    return directory


@pytest.fixture(scope="module")
def peer(keys_dir: Path) -> Iterator[Peer]:
    peer = Peer(free_port(), keys_dir)
    yield peer
    peer.close()


def keyring_of(directory: Path, name: str) -> Keyring:
    return Keyring(read_key_pair(directory / f"{name}.key_secret"), directory)


@pytest.fixture
def consumer(keys_dir: Path) -> Iterator[Consumer]:
    consumer = Consumer(keyring_of(keys_dir, "D"), "P")
    yield consumer
    consumer.mover.stop()


class Stranger:
    """Speaks the protocol, and knows P's address, its public key and the ids of transfers; has `pair`, or no key."""

    def __init__(self, port: int, server: KeyPair, pair: KeyPair | None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if pair is not None:
            self.socket.curve_serverkey = server.certificate.public_key.encode()
            self.socket.curve_publickey = pair.certificate.public_key.encode()
            self.socket.curve_secretkey = pair.secret_key.encode()
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, key: TransferKey) -> None:
        """All that could touch a transfer."""
        card = Engine("X", MemoryFabric()).core._consuming._card
        register = Register(
            key=key,
            attempt=9,
            mode=TransferMode.PULL,
            first_token=0,
            num_tokens=40,
            prompt_digest=b"digest",
            block_size=16,
        )
        for message in (Hello(card, 1), register, Cancel(key, 9, Reason.CONSUMER_GONE), Watch(key)):
            with suppress(zmq.Again):  # ZeroMQ gives up on a connection that was refused
                self.socket.send(encode(message), zmq.NOBLOCK)

    def hears(self, seconds: float) -> bool:
        return bool(self.socket.poll(seconds * 1000))

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@BOTH
def test_bytes_cross_between_peers_with_keys(peer, consumer, keys_dir, mode):
    """As without them, with P's certificate named by its key or by its name."""
    public_key = read_certificate(keys_dir / "P.key").public_key
    for identity in ("P", public_key):
        transfer_id = f"keys-{mode}-{len(identity)}"
        consumer.identity = identity
        consumer.wait_for(peer, transfer_id, mode, (10, 30, 11))
        peer.tell(f"announce {transfer_id}", f"finish {transfer_id}")
        assert consumer.report().ok
        peer.expect(f"released {transfer_id}")


@BOTH
@pytest.mark.parametrize("who", ["without a key", "with another key", "with a router's key"])
def test_a_stranger_neither_registers_nor_cancels_nor_learns(peer, consumer, keys_dir, mode, who):
    """It names a transfer of D's, with a newer attempt; D gets its bytes, and the stranger not one frame.

    A router's key watches, and so hears of progress alone.
    """
    transfer_id = f"{who}-{mode}"
    pairs = {
        "without a key": None,
        "with another key": make_key_pair("D", PeerRole.ENGINE),
        "with a router's key": read_key_pair(keys_dir / "router.key_secret"),
    }
    stranger = Stranger(peer.port, read_key_pair(keys_dir / "P.key_secret"), pairs[who])
    try:
        peer.tell(f"announce {transfer_id}")
        consumer.wait_for(peer, transfer_id, mode, (10, 30, 11))
        peer.expect("connected D")
        time.sleep(0.5)  # and is registered
        stranger.say(TransferKey(transfer_id))
        if who == "with a router's key":
            assert stranger.hears(5.0)
            assert b"progress" in stranger.socket.recv()
        assert not stranger.hears(0.7)
        peer.tell(f"finish {transfer_id}")
        report = consumer.report()
        assert (report.ok, report.reason) == (True, "none")
        peer.expect(f"released {transfer_id}")
    finally:
        stranger.close()


def test_a_consumer_whose_key_is_not_accepted_is_told_at_once(peer, keys_dir, tmp_path):
    """Well within the time for a connection; the report says what is wrong."""
    make_keys(tmp_path, "D")
    (tmp_path / "P.key").write_text((keys_dir / "P.key").read_text())
    consumer = Consumer(keyring_of(tmp_path, "D"), "P")
    try:
        consumer.wait_for(peer, "not-accepted", TransferMode.PUSH, (1, 2, 3))
        report = consumer.report(1.0)
        assert (report.ok, report.reason) == (False, "not_authenticated")
        assert f"127.0.0.1:{peer.port} does not accept this engine's key" in report.detail
    finally:
        consumer.mover.stop()


def test_a_consumer_is_accepted_as_soon_as_its_certificate_is_there(peer, keys_dir, tmp_path):
    """No restart on either side: refused, added, served. Taken out again, it is lost."""
    make_keys(tmp_path, "late")
    (tmp_path / "P.key").write_text((keys_dir / "P.key").read_text())
    consumer = Consumer(keyring_of(tmp_path, "late"), "P")
    try:
        consumer.wait_for(peer, "too-early", TransferMode.PUSH, (1, 2, 3))
        assert consumer.report().reason == "not_authenticated"
        (keys_dir / "late.key").write_text((tmp_path / "late.key").read_text())
        time.sleep(1.1)
        peer.tell("announce in-time", "finish in-time")
        consumer.wait_for(peer, "in-time", TransferMode.PUSH, (1, 2, 3))
        assert consumer.report().ok
        peer.tell("announce revoked")
        consumer.wait_for(peer, "revoked", TransferMode.PUSH, (1, 2, 3))
        (keys_dir / "late.key").unlink()
        peer.expect("lost D", 5.0)
        assert not consumer.report(5.0).ok
        peer.tell("finish revoked")
    finally:
        (keys_dir / "late.key").unlink(missing_ok=True)
        consumer.mover.stop()


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        ("", "nobody said which key"),
        ("Q", "no key in .* is Q"),
        ("~" * 40, "no key in"),
        ("router", "router is a router and no engine"),
    ],
)
def test_a_producer_whose_key_is_not_accepted_is_not_dialled(consumer, identity, text):
    """What a request says of the prefill worker is believed only if the key is an accepted engine's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)

        class Elsewhere:
            port = listener.getsockname()[1]

        consumer.identity = identity
        consumer.wait_for(Elsewhere, "nobody", TransferMode.PUSH, (1, 2, 3))  # type: ignore[arg-type]
        report = consumer.report(1.0)
        assert report.reason == "not_authenticated"
        assert re.search(text, report.detail)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_somebody_else_at_the_producer_s_address_is_found_out(consumer, keys_dir):
    """It has a key of its own, or none, and may even listen where P did: the handshake fails, and nothing is said."""
    impostor = Peer(free_port())
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    own = make_key_pair("P", PeerRole.ENGINE)
    server.curve_server = True
    server.curve_publickey, server.curve_secretkey = own.certificate.public_key.encode(), own.secret_key.encode()

    class Impostor:
        port = server.bind_to_random_port("tcp://127.0.0.1")

    try:
        consumer.wait_for(Impostor, "impostor", TransferMode.PUSH, (1, 2, 3))  # type: ignore[arg-type]
        assert consumer.report(5.0).reason == "not_authenticated"
        assert not server.poll(0)
        consumer.wait_for(impostor, "open", TransferMode.PUSH, (1, 2, 3))  # one without any key
        assert consumer.report(5.0).reason == "not_authenticated"
    finally:
        server.close(0)
        context.term()
        impostor.close()
