"""The control channel's sockets by themselves: who gets in, and what floods may cost."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from kvberth.keys import KeyPair, Keyring, PeerRole, make_key_pair, write_key_pair
from kvberth.mover import channel as module
from kvberth.mover.channel import Channel, FromClient
from kvberth.protocol.messages import MAX_FRAME_BYTES

OWN, ONE, TWO = (make_key_pair(name, PeerRole.ENGINE) for name in ("own", "one", "two"))
WITH_AND_WITHOUT_KEYS = pytest.mark.parametrize("has_keys", [True, False], ids=["keys", "no keys"])


class Server:
    """A channel that listens, driven as the mover drives it, by the test's own thread."""

    def __init__(self, keyring: Keyring | None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.channel = Channel(keyring)
        self.channel.listen("127.0.0.1", self.port)
        self.frames: list[FromClient] = []
        self.num_turns = 0
        self.num_breaks = 0

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> "Server":
        """Turn by turn, asleep while nothing comes."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not until():
            self.channel.wait(min(0.1, end - now), now)
            now = time.monotonic()
            self.channel.admit(now)
            self.frames += self.channel.from_clients(now)
            self.num_breaks += self.channel.has_broken_clients(now)
            self.num_turns += 1
        return self

    def frames_of(self, text: bytes) -> list[FromClient]:
        return [each for each in self.frames if each.frame.startswith(text)]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[[bool], Server]]:
    """A server with keys, which accepts `ONE` and `TWO`, or one without."""
    servers = []

    def make(has_keys: bool) -> Server:
        for pair in (OWN, ONE, TWO):
            write_key_pair(pair, tmp_path)
        servers.append(Server(Keyring(OWN, tmp_path) if has_keys else None))
        return servers[-1]

    yield make
    for server in servers:
        server.channel.close()


@pytest.fixture
def server(make_server: Callable[[bool], Server], request: pytest.FixtureRequest) -> Server:
    """With keys, unless the test's parameter says otherwise."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return make_server(parameters.get("has_keys", True))


def connect(context: zmq.Context, server: Server, pair: KeyPair | None, route: bytes | None = None) -> zmq.Socket:
    client = context.socket(zmq.DEALER)
    client.linger = 0
    if route is not None:
        client.routing_id = route
    if pair is not None:
        client.curve_serverkey = OWN.certificate.public_key.encode()
        client.curve_publickey = pair.certificate.public_key.encode()
        client.curve_secretkey = pair.secret_key.encode()
    client.connect(f"tcp://127.0.0.1:{server.port}")
    return client


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Do it again and again in a thread, until the function that is returned is called."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def stop() -> None:
        is_over.set()
        thread.join(10)

    return stop


def test_a_frame_comes_with_its_sender(server, context):
    """Each peer's own certificate, as it has proved it."""
    with closing(connect(context, server, ONE)) as one, closing(connect(context, server, TWO)) as two:
        one.send(b"from one")
        two.send(b"from two")
        server.run(5, lambda: len(server.frames) == 2)
        assert {(each.frame, each.sender) for each in server.frames} == {
            (b"from one", ONE.certificate),
            (b"from two", TWO.certificate),
        }


@WITH_AND_WITHOUT_KEYS
def test_nobody_takes_over_another_one_s_connection(server, context, has_keys):
    """By claiming its routing id: what is sent to the first still reaches the first."""
    one = connect(context, server, ONE if has_keys else None, b"claimed")
    one.send(b"first")
    server.run(5, lambda: bool(server.frames))
    two = connect(context, server, TWO if has_keys else None, b"claimed")
    with closing(one), closing(two):
        two.send(b"second")
        server.run(0.3)
        assert [each.frame for each in server.frames] == [b"first"]
        server.channel.send_to_client(b"claimed", b"for one")
        assert one.poll(2000)
        assert one.recv() == b"for one"
        assert not two.poll(100)


@WITH_AND_WITHOUT_KEYS
def test_strangers_connections_wake_the_mover_seldom(server, context, has_keys):
    """A hundred times a second and not once per connection; none counts as a consumer's that broke."""
    one = connect(context, server, ONE if has_keys else None)
    one.send(b"here I am")
    server.run(5, lambda: bool(server.frames))
    server.frames.clear()
    server.num_turns = made = 0

    def knock() -> None:
        nonlocal made
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1) as connection:
            connection.send(b"rubbish" * 20)
            made += 1

    stop = in_background(knock)
    began = time.monotonic()
    server.run(2.0)
    seconds = time.monotonic() - began
    stop()
    per_second = 1 / module._STRANGERS_REST_SECONDS
    assert made > 2 * per_second * seconds, "too few connections to tell"
    assert server.num_turns <= 2.5 * per_second * seconds
    assert server.num_breaks == 0
    assert server.frames == []
    one.close(0)


def test_strangers_keys_wake_the_mover_seldom(server, context):
    """Each makes the handshake with a new key, and is refused; a peer is let in among them."""
    num_refused = 0
    strangers = zmq.Context()

    def knock() -> None:
        nonlocal num_refused
        stranger = connect(strangers, server, make_key_pair("x", PeerRole.ENGINE))
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        num_refused += bool(monitor.poll(500))
        stranger.disable_monitor()
        monitor.close()
        stranger.close(0)

    stops = [in_background(knock) for _ in range(4)]
    began = time.monotonic()
    server.run(1.0)
    with closing(connect(context, server, ONE)) as one:
        one.send(b"let me in")
        server.run(5.0, lambda: bool(server.frames))
    seconds = time.monotonic() - began
    for stop in stops:
        stop()
    strangers.destroy(0)
    assert num_refused > 20
    assert [each.sender for each in server.frames] == [ONE.certificate]
    # Besides, every handshake that fails is a connection that ends.
    assert server.num_turns <= 6 / module._STRANGERS_REST_SECONDS * seconds


def test_questions_of_the_gate_are_answered_in_handfuls(server):
    """However fast they come, the mover looks at them a hundred times a second at most."""
    asking = server.channel._context.socket(zmq.DEALER)
    asking.linger = 0
    asking.connect("inproc://zeromq.zap.01")
    num_answered = 0

    def ask() -> None:
        nonlocal num_answered
        asking.send_multipart([b"", b"1.0", b"1", b"", b"127.0.0.1", b"", b"CURVE", bytes(32)])
        if asking.poll(200):
            num_answered += asking.recv_multipart()[3:5] == [b"400", b"key not accepted"]

    stop = in_background(ask)
    began = time.monotonic()
    server.run(1.0)
    seconds = time.monotonic() - began
    stop()
    asking.close(0)
    assert num_answered > 20
    assert server.num_turns <= 2.5 / module._STRANGERS_REST_SECONDS * seconds


@pytest.mark.parametrize(
    "question",
    [
        [b"1.0", b"1", b"", b"127.0.0.1", b"", b"NULL"],
        [b"1.0", b"1", b"", b"127.0.0.1", b"", b"PLAIN", b"name", b"password"],
        [b"2.0", b"1", b"", b"127.0.0.1", b"", b"CURVE", bytes(32)],
        [b"1.0"],
    ],
    ids=["null", "plain", "version", "short"],
)
def test_the_gate_opens_to_curve_alone(server, question):
    """Whatever else ZeroMQ may ask about is refused."""
    with closing(server.channel._context.socket(zmq.REQ)) as asking:
        asking.linger = 0
        asking.connect("inproc://zeromq.zap.01")
        asking.send_multipart(question)
        server.run(5.0, lambda: bool(asking.poll(0)))
        assert asking.recv_multipart()[2] == b"400"


def test_the_end_of_a_peer_s_connection_is_noticed(server, context):
    """Of one that has said something."""
    one = connect(context, server, ONE)
    one.send(b"hello")
    server.run(5, lambda: bool(server.frames))
    one.close(0)
    server.run(5, lambda: server.num_breaks > 0)
    assert server.num_breaks == 1


@WITH_AND_WITHOUT_KEYS
def test_a_flood_is_cut_to_its_allowance_and_others_are_heard(make_server, context, monkeypatch, has_keys):
    """The flood may take so many units; all that another peer sends in the meantime gets through."""
    monkeypatch.setattr(module, "_UNITS_AT_ONCE", 300.0)
    monkeypatch.setattr(module, "_UNITS_PER_SECOND", 200.0)
    server = make_server(has_keys)
    one, two = (connect(context, server, pair if has_keys else None) for pair in (ONE, TWO))
    sent = 0

    def flood() -> None:
        nonlocal sent
        with suppress(zmq.Again):
            for _ in range(100):
                one.send(b"flood", zmq.NOBLOCK)
                sent += 1

    with closing(one), closing(two):
        began = time.monotonic()
        stop = in_background(flood)
        for number in range(20):
            two.send(b"quiet %d" % number)
            server.run(0.1)
        server.run(5, lambda: len(server.frames_of(b"quiet")) == 20)
        seconds = time.monotonic() - began
        stop()
    heard = len(server.frames_of(b"flood"))
    assert len(server.frames_of(b"quiet")) == 20
    # The last one is heard whole when a fraction of a unit is left.
    assert heard <= module._UNITS_AT_ONCE + module._UNITS_PER_SECOND * seconds + 1
    assert sent > 2 * heard, "too few messages to tell"
    # Nor does it keep the mover from the transfers: a handful, then a rest.
    assert server.num_turns <= 2.5 * seconds / module._REST_SECONDS + heard


@WITH_AND_WITHOUT_KEYS
def test_a_message_that_is_too_long_ends_the_connection(server, context, has_keys):
    """Before it is in memory; the largest one that may be passes."""
    with closing(connect(context, server, ONE if has_keys else None)) as one:
        one.send(bytes(MAX_FRAME_BYTES - 1024))
        server.run(5, lambda: bool(server.frames))
        assert len(server.frames) == 1
        one.send(bytes(MAX_FRAME_BYTES + 1))
        server.run(5, lambda: server.num_breaks > 0)
        assert len(server.frames) == 1


@WITH_AND_WITHOUT_KEYS
def test_a_connection_that_says_nothing_is_closed(make_server, monkeypatch, has_keys):
    """Whoever has not shaken hands in time."""
    monkeypatch.setattr(module, "_HANDSHAKE_MS", 300)
    server = make_server(has_keys)
    with socket.create_connection(("127.0.0.1", server.port), 5) as mute:
        server.run(0.6)
        mute.settimeout(5)
        while mute.recv(1024):  # ZeroMQ's own greeting, and then the end
            pass


def test_a_revoked_peer_is_not_heard_any_more(server, context, tmp_path):
    """What it says over the connection that it has is not passed on, and the route is told."""
    with closing(connect(context, server, ONE)) as one, closing(connect(context, server, TWO)) as two:
        one.send(b"before")
        two.send(b"before")
        server.run(5, lambda: len(server.frames) == 2)
        (route,) = (each.route for each in server.frames if each.sender == ONE.certificate)
        (tmp_path / "one.key").unlink()
        server.run(1.1)
        one.send(b"after")
        two.send(b"after")
        server.run(0.5)
        assert [each.sender for each in server.frames_of(b"after")] == [TWO.certificate]
        assert server.channel.revoked_clients() == {route}
        assert server.channel.revoked_clients() == set()


def test_messages_of_several_parts_are_dropped(server, context):
    """We send none."""
    with closing(connect(context, server, ONE)) as one:
        one.send_multipart([b"two", b"parts"])
        one.send(b"one part")
        server.run(5, lambda: bool(server.frames))
        assert [each.frame for each in server.frames] == [b"one part"]


@pytest.mark.parametrize("has_keys", [False], ids=["no keys"])
def test_a_message_without_zeromq_s_greeting_is_dropped(server, context, has_keys, caplog):
    """It is of ZMTP 1.0 then, or chance has made it look so; the mover lives on, and who greets is heard."""
    with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
        stranger.sendall(b"\x01\x00" + b"\x06\x00hello")
        server.run(10, until=lambda: "of a ZeroMQ before 3.0" in caplog.text)
        with closing(connect(context, server, None)) as friend:
            friend.send(b"friend")
            server.run(10, until=lambda: bool(server.frames))
    assert [each.frame for each in server.frames] == [b"friend"]
