"""Two cores against each other, step by step; each test is one promise."""

import logging

import msgspec
import numpy as np
import pytest
from tests.mover.rig import ADDRESS, KEY, PORT, Engine, Rig, taken

from kvberth.mover import AdvancePrefill, AnnouncePrefill, AwaitRequest, DeclineRequest, FinishPrefill, RestartPrefill
from kvberth.mover.address import Address
from kvberth.protocol import PROTOCOL_VERSION, Reason, TransferKey, TransferMode, decode, encode
from kvberth.protocol.events import (
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    RequestDeclined,
    RequestWaiting,
)
from kvberth.protocol.ids import RequestId
from kvberth.protocol.messages import (
    Alive,
    Cancel,
    Heartbeat,
    Hello,
    HelloNeeded,
    Incompatible,
    Register,
    Watch,
    Writing,
    sealed,
)

PUSH, PULL = TransferMode.PUSH, TransferMode.PULL
BOTH = pytest.mark.parametrize("mode", [PUSH, PULL])


def register(blocks: tuple[int, ...]) -> Register:
    return Register(
        key=TransferKey("t-2"),
        attempt=0,
        mode=PUSH,
        first_token=0,
        num_tokens=40,
        prompt_digest=b"digest",
        block_size=16,
        blocks=blocks,
    )


@BOTH
def test_bytes_arrive(mode):
    """The whole path: hello, registration, transfer, end; both sides report it, with the same figures."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.released() == {"p-1"}
    assert rig.has_bytes()
    (report,) = rig.results["D"].reports
    assert (report.record.num_bytes, report.record.num_descriptors) == (2 * 3 * 64, 2)
    mover = rig.results["P" if mode is PUSH else "D"].reports[0]
    assert mover.post_seconds > 0


@BOTH
def test_bytes_arrive_slowly(mode):
    """A wire that takes its time: both sides drive their transport until the end, and are idle afterwards."""
    rig = Rig()
    rig.fabric.polls_until_done = 10
    rig.announce()
    rig.finish()
    rig.wait(mode)
    rig.settle(5)
    assert rig.received() == []
    assert rig.producer.core.is_moving()
    assert rig.consumer.core.is_moving()
    rig.settle(20)
    assert rig.has_bytes()
    assert not rig.producer.core.is_moving()
    assert not rig.consumer.core.is_moving()


def test_a_write_lands_though_the_word_of_it_was_lost():
    """D does not know that it is being written to, and drives its side when the next heartbeat is answered."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    rig.finish()
    lost = rig.producer.wire.to_clients
    assert [type(decode(frame)) for _, frame in lost] == [Writing]
    lost.clear()
    rig.settle()
    assert rig.received() == []
    rig.pass_time(1.5 * rig.consumer.timing.heartbeat_seconds)
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


def test_a_write_that_is_not_wanted_any_more_comes_to_its_end():
    """What is in flight when D gives up lands only while D drives its side; then its blocks are free."""
    rig = Rig()
    rig.fabric.polls_until_done = 10
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    rig.finish()
    rig.settle(3)
    rig.abort()
    rig.settle(3)
    assert rig.received() == []
    rig.settle(20)
    assert rig.received() == [("d-1", False, "consumer_gone")]
    assert not rig.consumer.core.is_moving()


@pytest.mark.parametrize("why", ["preempted", "superseded"])
def test_a_read_that_is_worthless_comes_to_its_end(why):
    """What is in flight when P says so lands only while P drives its side; then D's blocks are free."""
    rig = Rig()
    rig.fabric.polls_until_done = 10
    rig.announce()
    advanced = PrefillAdvanced(0, (1, 2, 3), is_complete=True)
    rig.producer.core.command(AdvancePrefill((KEY,), advanced), rig.now)
    rig.wait(PULL)
    rig.settle(5)
    assert rig.consumer.core.is_moving()
    if why == "preempted":
        rig.producer.core.command(RestartPrefill((KEY,), PrefillRestarted()), rig.now)
    else:
        other = Engine("E", rig.fabric)
        newer = msgspec.structs.replace(register((7, 8, 9)), key=KEY, attempt=1)
        for message in (Hello(other.core._consuming._card, 1), newer):
            rig.producer.core.frame_from_client(b"route-E", encode(message), rig.now)
    rig.settle(20)
    assert [(request, is_ok) for request, is_ok, _ in rig.received()] == [("d-1", False)]
    assert not rig.consumer.core.is_moving()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("block_size", 24, "block_size differs: prefill worker has 16, decode worker has 24"),
        ("dtype", "bfloat16", "dtype differs: prefill worker has float32, decode worker has bfloat16"),
        ("model", "n@2", "model differs: prefill worker has m@1, decode worker has n@2"),
        ("layout", "BLHNC", "layout differs: prefill worker has LBHNC, decode worker has BLHNC"),
    ],
)
def test_engines_that_do_not_fit_refuse_each_other(field, value, text):
    """The request ends at once, with the field and both values."""
    rig = Rig(**{field: value})
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    (report,) = rig.results["D"].received
    assert (report.ok, report.reason, report.detail) == (False, "incompatible", text)


def test_other_protocol_version_is_refused_with_both_versions():
    """Neither side tries to read what it does not know."""
    rig = Rig()
    rig.wait(PUSH)
    ((_, frame),) = rig.consumer.wire.to_servers
    rig.producer.core.frame_from_client(rig.route, sealed(frame[6:], version=9), rig.now)
    ((_, answer),) = rig.producer.wire.to_clients
    assert decode(answer) == Incompatible("protocol_version", str(PROTOCOL_VERSION), "9")
    rig.consumer.core.frame_from_server(ADDRESS, sealed(answer[6:], version=9), rig.now)
    rig.settle()
    (report,) = rig.results["D"].received
    assert report.detail == f"protocol_version differs: prefill worker has 9, decode worker has {PROTOCOL_VERSION}"


def test_unreachable_producer_is_given_up():
    """A wrong address ends the request within the time to connect."""
    rig = Rig()
    rig.is_cut = True
    rig.wait(PUSH)
    rig.pass_time(rig.consumer.timing.connect_seconds)
    assert rig.received() == [("d-1", False, "peer_unreachable")]
    assert rig.consumer.wire.hung_up == [ADDRESS]


def test_connections_that_are_cut_short_each_time_are_a_denial():
    """Once may be a process that has just died; for as long as it takes to connect it is somebody without our key."""
    rig = Rig()
    rig.is_cut = True
    rig.wait(PUSH)
    rig.consumer.core.server_cuts_short(ADDRESS)
    assert rig.received() == []
    rig.pass_time(rig.consumer.timing.connect_seconds)
    assert rig.received() == [("d-1", False, "not_authenticated")]


def test_a_producer_that_answers_at_last_may_have_cut_short_before():
    """It was being started anew."""
    rig = Rig()
    rig.consumer.core.server_cuts_short(ADDRESS)
    rig.wait(PUSH)
    rig.consumer.core.server_cuts_short(ADDRESS)
    rig.announce()
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]


def test_an_unreachable_producer_holds_up_nobody_else():
    """D waits for one that does not answer while it talks to another."""
    rig = Rig()
    event = RequestWaiting(RequestId("d-2"), 0, PUSH, 0, 40, b"digest", (10, 11, 12))
    rig.consumer.core.command(AwaitRequest(TransferKey("t-2"), "nowhere", PORT, event), rig.now)
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    rig.pass_time(rig.consumer.timing.connect_seconds)
    assert rig.received()[1:] == [("d-2", False, "peer_unreachable")]


def test_a_silent_consumer_holds_up_nobody_else():
    """P owes blocks to one that says nothing, and serves another meanwhile."""
    rig = Rig()
    other = Engine("E", rig.fabric, fill=2)
    rig.producer.core.frame_from_client(b"route-E", encode(Hello(other.core._consuming._card, 1)), rig.now)
    rig.producer.core.frame_from_client(b"route-E", encode(register((1, 2, 3))), rig.now)
    announced = PrefillAnnounced(RequestId("p-2"), 40, b"digest")
    rig.producer.core.command(AnnouncePrefill((TransferKey("t-2"),), announced), rig.now)
    rig.producer.core.command(FinishPrefill((TransferKey("t-2"),), PrefillFinished((4, 5, 6))), rig.now)
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert (other.memory == 2).all()
    rig.pass_time(6.0)
    assert rig.released() == {"p-1", "p-2"}


def test_idle_engine_wakes_for_the_end_of_a_lease():
    """Nothing arrives any more, and no request comes: time alone frees P's blocks."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.producer.core.turn(rig.now)
    wakeup = rig.producer.core.next_wakeup(rig.now)
    assert wakeup == rig.producer.timing.lease_seconds
    rig.now += wakeup
    rig.settle(1)
    assert rig.released() == {"p-1"}


@BOTH
def test_closed_engine_touches_nobody_s_memory_any_more(mode):
    """P shuts down in mid-transfer: what flies ends, and D goes on without it within seconds."""
    rig = Rig()
    rig.fabric.polls_until_done = 20
    rig.announce()
    rig.finish()
    rig.wait(mode)
    rig.settle(4)
    rig.producer.core.close(rig.now)
    rig.producer.transport.close()
    while not (received := rig.consumer.outbox.take().received):
        rig.now += 0.5
        rig.consumer.core.look(rig.now)
        rig.consumer.core.turn(rig.now)
    assert [report.ok for report in received] == [False]
    assert (rig.consumer.memory == 2).all()


@BOTH
def test_silent_producer_is_lost_within_seconds(mode):
    """P does not answer any more while it should compute."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.is_cut = True
    rig.pass_time(2.5)
    assert rig.received() == []
    rig.pass_time(1.0)
    assert rig.received() == [("d-1", False, "peer_lost")]


@BOTH
def test_silent_consumer_is_lost_within_seconds(mode):
    """D vanishes after it registered: P frees its blocks soon after it has finished."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.is_cut = True
    rig.pass_time(4.0)
    rig.finish()
    rig.settle()
    assert rig.released() == set()
    rig.pass_time(rig.producer.timing.rebind_seconds)
    assert rig.released() == {"p-1"}
    assert not rig.has_bytes()


def test_long_queue_on_a_living_producer_is_no_failure():
    """P computes for a minute; heartbeats keep the pair together."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.pass_time(60.0)
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


@BOTH
def test_producer_restarted_on_the_same_address(mode):
    """D notices the new incarnation, gives up what the old one owed, and works with the new one."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.restart_producer()
    rig.pass_time(1.5)
    assert rig.received() == [("d-1", False, "peer_lost")]
    rig.key = TransferKey("t-2")
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.finish()
    rig.settle()
    assert rig.received()[1:] == [("d-1", True, "none")]
    assert rig.has_bytes()


@BOTH
def test_producer_restarted_while_nothing_was_live(mode):
    """The first request after it already works: its registration is made again with the new incarnation."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.wait(mode)
    rig.settle()
    rig.restart_producer()
    rig.consumer.memory[:] = 2
    rig.key = TransferKey("t-2")
    rig.announce()
    rig.finish()
    rig.wait(mode)
    rig.settle()
    assert rig.received() == [("d-1", True, "none")] * 2
    assert rig.has_bytes()


@BOTH
def test_consumer_restarted_under_the_same_name(mode):
    """P drops the old incarnation with its registrations and serves the new one."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.restart_consumer()
    rig.wait(mode)
    rig.settle()
    rig.finish()
    rig.settle()
    assert [str(each.record.end) for each in rig.results["P"].reports] == ["completed"]
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


def break_connection(rig: Rig) -> None:
    """TCP's end, seen by both."""
    rig.producer.wire.gone.add(rig.route)
    rig.route += b"-again"  # ZeroMQ connects by itself, under another route
    rig.producer.core.clients_broke(rig.now)
    rig.consumer.core.server_broke(ADDRESS, rig.now)


@BOTH
def test_broken_connection_between_living_engines_loses_nothing(mode):
    """Both sides give each other time to connect again; the transfer goes on."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    break_connection(rig)
    rig.pass_time(5.0, step=0.1)
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


@BOTH
def test_refused_connection_is_the_end_of_a_producer(mode):
    """Nobody listens at its address any more: its process is gone, and D waits no longer."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.is_cut = True
    break_connection(rig)
    assert rig.received() == []
    rig.consumer.core.server_refuses(ADDRESS, rig.now)
    rig.settle()
    assert rig.received() == [("d-1", False, "peer_lost")]


@BOTH
def test_broken_connection_without_an_answer_is_silence(mode):
    """Nobody refuses: P may live behind a broken network, and write until it has noticed, too."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.is_cut = True
    break_connection(rig)
    rig.pass_time(2.5)
    assert rig.received() == []
    rig.pass_time(1.0)
    assert rig.received() == [("d-1", False, "peer_lost")]


def test_refusal_before_the_first_answer_ends_the_wait_at_once():
    """A producer that is not there: the request need not wait for it."""
    rig = Rig()
    rig.wait(PUSH)
    rig.consumer.core.server_refuses(ADDRESS, rig.now)
    assert rig.settle().received() == [("d-1", False, "peer_unreachable")]


@BOTH
def test_consumer_that_does_not_connect_again_is_lost(mode):
    """Within a second P ends what it owed, and keeps the blocks for another attempt."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.is_cut = True
    break_connection(rig)
    rig.finish()
    rig.pass_time(1.0, step=0.1)
    assert rig.producer.core.next_wakeup(rig.now) is not None
    assert not rig.producer.core.is_moving()
    rig.pass_time(rig.producer.timing.rebind_seconds, step=0.1)
    assert rig.released() == {"p-1"}


def test_idle_pair_lets_go_of_a_broken_connection():
    """No transfer is live: both forget each other, and the next request dials anew."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle()
    break_connection(rig)
    rig.pass_time(1.0, step=0.1)
    assert rig.consumer.wire.hung_up == [ADDRESS]
    rig.consumer.memory[:] = 2
    rig.key = TransferKey("t-2")
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle()
    assert rig.received() == [("d-1", True, "none")] * 2
    assert rig.has_bytes()


def test_missed_heartbeats_are_counted():
    """P is silent for longer than an interval, and then answers again."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.pass_time(3.0)
    assert rig.results["D"].heartbeats_missed == 0
    rig.is_cut = True
    rig.pass_time(1.6, step=0.2)
    rig.is_cut = False
    rig.pass_time(3.0)
    assert rig.results["D"].heartbeats_missed == 1
    assert rig.received() == []


def test_own_stall_gives_up_on_everybody_before_anything_is_written():
    """A producer that was stopped for 10 s must not write into blocks that its consumer has given away."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    rig.now += 10.0
    rig.finish()
    rig.producer.core.turn(rig.now)
    rig.pass_time(3.0)
    assert not rig.has_bytes()
    assert rig.released() == {"p-1"}
    assert [str(each.record.reason) for each in rig.results["P"].reports] == ["peer_lost"]


def test_a_registration_that_was_long_on_the_way_is_not_written_to():
    """D has given up meanwhile: the bytes wait for a sign that it has not."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle(1)
    late = [frame for _, frame in rig.consumer.wire.to_servers]
    assert [type(decode(frame)) for frame in late] == [Register, Heartbeat]
    rig.is_cut = True
    rig.pass_time(4.0)
    assert rig.received() == [("d-1", False, "peer_lost")]
    for frame in late:
        rig.producer.core.frame_from_client(rig.route, frame, rig.now)
    rig.pass_time(10.0)
    assert (rig.consumer.memory == 2).all()
    assert rig.released() == {"p-1"}


def test_what_was_registered_before_the_consumer_dialled_anew_is_not_written_to():
    """D has given up on P and is back: that it is alive proves nothing for what it has given up."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle(1)
    late = [frame for _, frame in rig.consumer.wire.to_servers]
    rig.is_cut = True
    rig.pass_time(4.0)
    assert rig.received() == [("d-1", False, "peer_lost")]
    for frame in late:
        rig.producer.core.frame_from_client(rig.route, frame, rig.now)
    rig.is_cut, rig.route = False, b"route-D-again"
    event = RequestWaiting(RequestId("d-2"), 0, PUSH, 0, 40, b"digest", (10, 11, 12))
    rig.consumer.core.command(AwaitRequest(TransferKey("t-2"), "P", PORT, event), rig.now)
    rig.settle()
    assert (rig.consumer.memory == 2).all()
    rig.pass_time(2.5)
    assert rig.released() == {"p-1"}


def test_blocks_of_a_consumer_that_dialled_anew_are_its_own_again():
    """P was stopped in the middle of a WRITE, and D has given up on it: what D registers next may name the same blocks.

    The turns are those of the mover's thread: a look, frames, and then what has landed is given out.
    """
    rig = Rig()
    rig.fabric.polls_until_done = 10**6
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    rig.finish()
    rig.settle()
    assert rig.producer.core.is_moving()
    rig.now += 4.0
    rig.consumer.core.turn(rig.now)
    rig.consumer.wire.to_servers.clear()
    rig.route = b"route-D-again"
    other = TransferKey("t-2")
    rig.producer.core.command(AnnouncePrefill((other,), PrefillAnnounced(RequestId("p-2"), 40, b"digest")), rig.now)
    event = RequestWaiting(RequestId("d-2"), 0, PUSH, 0, 40, b"digest", (7, 8, 9))
    rig.consumer.core.command(AwaitRequest(other, "P", PORT, event), rig.now)
    for _ in range(2):  # the greeting and its answer, then the registration
        rig.producer.core.look(rig.now)
        for _, frame in taken(rig.consumer.wire.to_servers):
            rig.producer.core.frame_from_client(rig.route, frame, rig.now)
        rig.producer.core.turn(rig.now)
        for _, frame in taken(rig.producer.wire.to_clients):
            rig.consumer.core.frame_from_server(ADDRESS, frame, rig.now)
    rig.fabric.polls_until_done = 0
    rig.producer.memory[:, [4, 5, 6]] = np.array([50, 51, 52], dtype=np.uint8)[None, :, None]
    rig.producer.core.command(FinishPrefill((other,), PrefillFinished((4, 5, 6))), rig.now)
    rig.settle()
    assert rig.received() == [("d-1", False, "peer_lost"), ("d-2", True, "none")]
    assert rig.has_bytes()


def test_the_producer_stops_writing_before_the_consumer_gives_up():
    """Whatever is lost between them, and however late P's last news of D came."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.pass_time(1.5)
    (stamp,) = {client.proved_at for client in rig.producer.core._producing._clients.values()}
    rig.is_cut = True
    late = encode(Alive(stamp))
    while not rig.received():
        rig.producer.core.frame_from_client(rig.route, late, rig.now)
        rig.pass_time(0.1, step=0.1)
        may_write = bool(rig.producer.core._producing._clients)
        assert not (may_write and rig.received())
    assert rig.received() == [("d-1", False, "peer_lost")]


def moving(mode) -> tuple[Rig, list[str]]:
    """A transfer under way that does not end, and what P does with its transport from here on."""
    rig = Rig()
    rig.fabric.polls_until_done = 1_000_000
    rig.announce()
    rig.wait(mode)
    rig.finish()
    rig.settle()
    transport, done = rig.producer.transport, []
    drive, remove = transport.progress, transport.remove_peer
    transport.progress = lambda: (done.append("drive"), drive())
    transport.remove_peer = lambda name, *, is_live: (done.append(f"remove {is_live}"), remove(name, is_live=is_live))
    return rig, done


@BOTH
def test_who_wakes_up_cuts_before_the_transport_is_driven(mode):
    """What P had posted, or was asked for, before it was stopped is for blocks that D has taken back meanwhile."""
    rig, done = moving(mode)
    rig.now += 5.0
    rig.producer.core.look(rig.now)
    rig.producer.core.turn(rig.now)
    rig.producer.core.look(rig.now)
    assert done[0] == "remove True"


@BOTH
def test_a_sign_of_life_that_waits_to_be_read_counts(mode):
    """P was only busy: the transport rests for one turn, in which D is heard."""
    rig, done = moving(mode)
    core = rig.producer.core
    (client,) = core._producing._clients.values()
    asked = client.silent_since + 2.0
    rig.now = asked + 1.0
    core.look(rig.now)
    assert done == []
    core.frame_from_client(rig.route, encode(Alive(asked)), rig.now)
    core.turn(rig.now)
    core.look(rig.now)
    assert done == ["drive"]


@pytest.mark.parametrize("stamp", [1e9, float("inf"), float("nan"), -1.0])
def test_a_peer_cannot_answer_what_was_never_asked(stamp):
    """A stamp of no moment of ours proves nothing."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    rig.is_cut = True
    rig.now += 2.0
    rig.producer.core.frame_from_client(rig.route, encode(Alive(stamp)), rig.now)
    rig.pass_time(1.0)
    assert [str(each.record.reason) for each in rig.results["P"].reports] == []
    rig.finish()
    rig.settle()
    assert not rig.has_bytes()


def test_declined_while_it_is_with_a_producer():
    """vLLM tells of one request twice: the second word changes nothing, greeted or not."""
    rig = Rig()
    decline = DeclineRequest(KEY, "P", PORT, RequestDeclined(0, Reason.CONSUMER_GONE))
    rig.announce()
    rig.wait(PUSH)
    rig.consumer.core.command(decline, rig.now)
    rig.settle()
    rig.consumer.core.command(decline, rig.now)
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]


def test_long_sleep_is_no_stall():
    """An idle rank sleeps for hours and is none the worse."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.wait(PULL)
    rig.settle()
    rig.now += 3600
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    assert [reason for _, ok, reason in rig.received() if not ok] == []


def test_idle_rank_sleeps_without_end():
    """With nothing live there is no heartbeat, no poll and no deadline, once the memory of ends has faded."""
    rig = Rig()
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle()
    assert rig.consumer.core.next_wakeup(rig.now) is None
    wakeup = rig.producer.core.next_wakeup(rig.now)
    assert wakeup == rig.producer.timing.memory_seconds
    rig.pass_time(wakeup, step=1.0)
    assert rig.producer.core.next_wakeup(rig.now) is None
    assert rig.consumer.wire.to_servers == []


def test_live_transfer_is_looked_at_every_millisecond():
    """And only then."""
    rig = Rig()
    rig.fabric.polls_until_done = 1000
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    assert 0.5 < rig.consumer.core.next_wakeup(rig.now) <= 1.0
    rig.finish()
    rig.settle(3)
    assert rig.consumer.core.next_wakeup(rig.now) == 0.001
    assert rig.producer.core.next_wakeup(rig.now) == 0.001


@pytest.mark.parametrize(
    ("blocks", "text"), [((1, 2, 32), "block 32 is outside"), ((-1, 2, 3), "block -1"), ((4, 4, 5), "twice")]
)
def test_foreign_blocks_are_refused(blocks, text):
    """A registration for blocks outside of the peer's own region is never written to."""
    rig = Rig()
    rig.wait(PUSH)
    rig.settle()
    rig.producer.core.frame_from_client(rig.route, encode(register(blocks)), rig.now)
    answer = decode(rig.producer.wire.to_clients[-1][1])
    assert answer.reason == "invalid_blocks"
    assert text in answer.detail


def test_stranger_must_say_hello_first():
    """An engine that P does not know can neither register nor beat."""
    rig = Rig()
    for message in (register((1, 2, 3)), Heartbeat()):
        rig.producer.core.frame_from_client(b"stranger", encode(message), rig.now)
    answers = [(route, decode(frame)) for route, frame in rig.producer.wire.to_clients]
    assert answers == [(b"stranger", HelloNeeded()), (b"stranger", HelloNeeded())]


@pytest.mark.parametrize("is_computed", [True, False])
def test_router_whose_client_has_left_frees_the_producer(is_computed):
    """No decode worker was told of the transfer: the router, which says no hello, lets P know."""
    rig = Rig()
    rig.announce()
    if is_computed:
        rig.finish()
    frame = encode(Cancel(rig.key, 0, Reason.CONSUMER_GONE))
    rig.producer.core.frame_from_client(b"route-R", frame, rig.now)
    if not is_computed:
        rig.finish()
    rig.pass_time(rig.producer.timing.rebind_seconds)
    assert rig.released() == {"p-1"}
    assert rig.producer.wire.to_clients == []


def test_router_cannot_end_what_a_decode_worker_waits_for():
    """It has registered; only its own word counts."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    frame = encode(Cancel(rig.key, 0, Reason.CONSUMER_GONE))
    rig.producer.core.frame_from_client(b"route-R", frame, rig.now)
    rig.finish()
    assert rig.settle().received() == [("d-1", True, "none")]


def test_rubbish_is_dropped_and_logged(caplog):
    """A frame that is none changes nothing."""
    rig = Rig()
    with caplog.at_level(logging.WARNING):
        rig.producer.core.frame_from_client(rig.route, sealed(b"rubbish"), rig.now)
    assert "dropped 1 control messages" in caplog.text
    rig.announce()
    rig.finish()
    rig.wait(PUSH)
    rig.settle()
    assert rig.has_bytes()


def test_who_talks_rubbish_fills_no_log(caplog):
    """A line of each kind stands for all that came within ten seconds; and what comes is served."""
    rig = Rig()
    rig.announce()
    rig.wait(PUSH)
    rig.settle()
    caplog.clear()
    for frame in (sealed(b"rubbish"), encode(Watch(rig.key)), b"\x00\x03damaged"):
        for _ in range(1000):
            rig.consumer.core.frame_from_server(ADDRESS, frame, rig.now)
    for frame in (sealed(b"rubbish"), encode(HelloNeeded()), b"\x00\x03damaged"):
        for _ in range(1000):
            rig.producer.core.frame_from_client(rig.route, frame, rig.now)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4, lines
    rig.finish()
    rig.settle()
    assert rig.has_bytes()


@BOTH
def test_broken_link_fails_both_sides(mode):
    """The bytes cannot move: D is told why and P frees its blocks."""
    rig = Rig()
    rig.announce()
    rig.wait(mode)
    rig.settle()
    rig.fabric.broken |= {("P/0/a", "D/0/a"), ("D/0/a", "P/0/a")}
    rig.finish()
    rig.settle()
    assert rig.received() == [("d-1", False, "transport")]
    rig.pass_time(2.5)
    assert rig.released() == {"p-1"}


@BOTH
def test_abort_in_flight_ends_on_both_sides(mode):
    """D's request is aborted while bytes move: both sides free after the last one, and the metrics say cancelled."""
    rig = Rig()
    rig.fabric.polls_until_done = 20
    rig.announce()
    rig.finish()
    rig.wait(mode)
    rig.settle(4)
    rig.abort()
    rig.settle(2)
    assert rig.received() == []
    assert rig.released() == set()
    rig.settle(40)
    assert [ok for _, ok, _ in rig.received()] == [False]
    rig.pass_time(2.5)
    assert rig.released() == {"p-1"}
    assert str(rig.results["D"].reports[0].record.end) == "cancelled"


def test_second_rank_dials_the_next_port():
    """Rank r of D talks to rank r of P."""
    rig = Rig()
    rig.consumer = Engine("D", rig.fabric, rank=1)
    rig.wait(PUSH)
    assert rig.consumer.wire.dialled == [Address(f"P:{PORT + 1}")]
