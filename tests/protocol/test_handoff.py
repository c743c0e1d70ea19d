"""Two machines hand over one request, well and badly; each test is one promise."""

import tracemalloc

import pytest
from tests.protocol.pair import CONSUMER, KEY, PRODUCER, Pair, announced, register, waiting

from kvberth.protocol import (
    End,
    Producer,
    Reason,
    ReleaseRequest,
    SendMessage,
    StartRead,
    StartWrite,
    StopPosting,
    Timing,
    TransferKey,
    TransferMode,
)
from kvberth.protocol.consumer_states import ConsumerState
from kvberth.protocol.events import (
    CancelReceived,
    PeerReady,
    PrefillAborted,
    PrefillFinished,
    RegisterReceived,
    RequestAborted,
    RequestDeclined,
    StatusAsked,
    WritesDone,
)
from kvberth.protocol.ids import PeerName
from kvberth.protocol.messages import Accepted, Ended, Located, Quiesced, Writing
from kvberth.protocol.producer_states import ProducerState
from kvberth.protocol.timeline import PrefillTimes

PUSH, PULL = TransferMode.PUSH, TransferMode.PULL
COMPLETED = [("producer", End.COMPLETED, Reason.NONE), ("consumer", End.COMPLETED, Reason.NONE)]


def test_push_writes_when_both_sides_are_there():
    """D registers while P computes; P writes when it has finished, and D goes on after the last byte."""
    pair = Pair().announce().wait().deliver()
    assert pair.started() == []
    pair.finish_prefill().deliver()
    assert pair.started() == [StartWrite(KEY, CONSUMER, (1, 2, 3), (7, 8, 9))]
    assert pair.consumer.state(KEY) is ConsumerState.RECEIVING
    assert pair.received() == []
    assert pair.released() == []
    pair.writes_done().deliver()
    assert pair.ends() == COMPLETED
    assert pair.received() == [("d-1", True)]
    assert pair.released() == ["p-1"]


def test_pull_reads_when_prefill_is_over():
    """P tells where its blocks are, D reads them, and P keeps them until D says so; D goes on when P has confirmed."""
    pair = Pair().announce().finish_prefill().wait(waiting(PULL)).deliver()
    assert pair.started() == [StartRead(KEY, PRODUCER, (7, 8, 9), (1, 2, 3))]
    assert pair.released() == []
    pair.reads_done()
    assert pair.received() == []
    pair.deliver_to_producer()
    assert pair.released() == ["p-1"]
    pair.deliver()
    assert pair.received() == [("d-1", True)]
    assert sorted(pair.ends()) == sorted(COMPLETED)


def read_all() -> Pair:
    """D has read everything, and P has not heard of it yet; its engine still has the request."""
    blocks_ready = Pair().announce().advance_prefill(0, 1, 2, 3, is_complete=True)
    return blocks_ready.wait(waiting(PULL)).deliver().reads_done()


def test_what_was_read_from_blocks_that_were_taken_away_is_not_reported():
    """P's engine preempts the request while D reads: only P knows that the bytes are somebody else's."""
    pair = read_all().restart_prefill().deliver()
    assert pair.received() == [("d-1", False)]


def test_what_was_read_after_the_producer_had_given_up_is_not_reported():
    """P has not heard of D for too long, and its blocks may be somebody else's; D is none the wiser."""
    pair = read_all()
    done = list(pair.to_producer)
    pair.to_producer.clear()
    pair.kill_consumer().finish_prefill().give_up()
    assert pair.released() == ["p-1"]
    pair.to_producer[:] = done
    pair.deliver().heartbeat().deliver()
    assert pair.received() == [("d-1", False)]


def test_a_confirmation_that_was_lost_is_repeated_on_the_heartbeat():
    """P's answer as well as D's `Done`."""
    pair = read_all()
    pair.to_producer.clear()
    pair.heartbeat().deliver_to_producer().deliver_to_consumer().deliver_to_producer()
    assert pair.ends() == [("producer", End.COMPLETED, Reason.NONE)]
    pair.to_consumer.clear()
    pair.heartbeat().deliver()
    assert pair.received() == [("d-1", True)]


@pytest.mark.parametrize("how", ["abort", "deadline", "death"])
def test_nobody_waits_for_a_confirmation_for_ever(how):
    """Nothing is in flight: D's blocks are free at once."""
    pair = read_all()
    if how == "abort":
        pair.abort_request()
    elif how == "deadline":
        pair.pass_time(Timing().deadline_seconds)
    else:
        pair.kill_producer()
    assert pair.received() == [("d-1", False)]
    pair.deliver().pass_time(2.0).heartbeat().deliver().finish_prefill().give_up()
    assert pair.released() == ["p-1"]


@pytest.mark.parametrize("mode", [PUSH, PULL])
@pytest.mark.parametrize("order", ["announce wait finish", "wait announce finish", "announce finish wait"])
def test_either_side_may_come_first(mode, order):
    """The order of arrival does not matter."""
    pair = Pair()
    for step in order.split():
        {"announce": pair.announce, "finish": pair.finish_prefill, "wait": lambda: pair.wait(waiting(mode))}[step]()
        pair.deliver()
    (pair.writes_done if mode is PUSH else pair.reads_done)()
    pair.deliver()
    assert sorted(pair.ends()) == sorted(COMPLETED)
    assert pair.received() == [("d-1", True)]
    assert pair.released() == ["p-1"]


@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_only_the_missing_tail_is_moved(mode):
    """D holds the first two blocks already."""
    blocks = (9,)
    pair = Pair().announce().finish_prefill().wait(waiting(mode, first_token=32, blocks=blocks)).deliver()
    (started,) = pair.started()
    assert (started.local_blocks, started.remote_blocks) == (((3,), (9,)) if mode is PUSH else ((9,), (3,)))


def test_nothing_to_move_completes_at_once():
    """D has every block of the prompt: P frees its blocks without a transfer."""
    pair = Pair().announce().finish_prefill().decline().deliver()
    assert pair.started() == []
    assert pair.ends() == [
        ("consumer", End.COMPLETED, Reason.NOT_NEEDED),
        ("producer", End.COMPLETED, Reason.NOT_NEEDED),
    ]
    assert pair.released() == ["p-1"]


def test_declined_while_computing_releases_when_the_engine_is_done():
    """P's blocks stay with the engine as long as it computes, and are released at its end."""
    pair = Pair().decline().deliver().announce()
    assert pair.released() == []
    pair.finish_prefill()
    assert pair.released() == ["p-1"]


def test_different_prompts_under_one_id_are_refused():
    """D gets the reason; P goes on and holds its blocks for whom they are meant."""
    pair = Pair().announce().wait(waiting(digest=b"another prompt..")).deliver()
    assert pair.ends() == [("consumer", End.FAILED, Reason.PROMPT_DIFFERS)]
    assert pair.received() == [("d-1", False)]
    pair.finish_prefill()
    assert pair.producer.state(KEY) is ProducerState.HELD


def test_wrong_number_of_blocks_is_refused():
    """A registration that names two blocks for three is not written to."""
    pair = Pair().announce().finish_prefill().wait(waiting(blocks=(7, 8))).deliver()
    assert pair.started() == []
    assert pair.ends() == [("consumer", End.FAILED, Reason.INVALID_BLOCKS)]


def test_invalid_blocks_leave_no_trace_on_the_producer():
    """A registration for blocks that the peer cannot have is answered, and nothing is remembered of it."""
    producer = Producer(16, Timing())
    actions = producer.handle(KEY, RegisterReceived(CONSUMER, register(), "block 99 is outside"), 1.0)
    ended = Ended(KEY, 0, End.FAILED, Reason.INVALID_BLOCKS, "block 99 is outside")
    assert actions == [SendMessage(CONSUMER, ended)]
    assert producer.state(KEY) is None


def test_prefill_aborted_tells_the_consumer():
    """P's request is aborted: D hears it at once and P's blocks are free."""
    pair = Pair().announce().wait().deliver().abort_prefill().deliver()
    assert pair.received() == [("d-1", False)]
    assert pair.ends() == [
        ("producer", End.FAILED, Reason.PREFILL_ABORTED),
        ("consumer", End.FAILED, Reason.PREFILL_ABORTED),
    ]
    assert pair.released() == ["p-1"]


def test_registration_after_abort_is_answered_with_the_end():
    """D comes late: it hears what became of the prefill instead of waiting."""
    pair = Pair().announce().abort_prefill().wait().deliver()
    assert pair.received() == [("d-1", False)]
    assert ("consumer", End.FAILED, Reason.PREFILL_ABORTED) in pair.ends()


def test_request_that_never_reaches_the_producer_ends():
    """A registration for a request that P never gets does not wait for ever."""
    pair = Pair().wait().deliver().pass_time(Timing().orphan_seconds).deliver()
    assert pair.received() == [("d-1", False)]
    assert pair.ends()[0] == ("producer", End.FAILED, Reason.PREFILL_NEVER_CAME)


def test_long_step_of_the_producer_is_no_reason_to_give_up():
    """P has been computing one step for a minute: it cannot know yet which requests have arrived meanwhile."""
    pair = Pair()
    pair.site.step_began = pair.now
    pair.wait().deliver().pass_time(60.0).deliver()
    assert pair.received() == []
    pair.announce().finish_prefill().deliver().writes_done().deliver()
    assert pair.received() == [("d-1", True)]


def test_busy_producer_that_looks_and_finds_nothing_gives_up():
    """A later step has taken in everything, and the request was not there."""
    pair = Pair()
    pair.site.step_began = pair.now
    pair.wait().deliver().pass_time(60.0)
    pair.site.step_began = pair.now
    pair.pass_time(1.0).deliver()
    assert pair.received() == [("d-1", False)]


def test_lease_ends_on_its_tick():
    """Blocks that nobody asks for are released when their lease ends, not before."""
    pair = Pair().announce().finish_prefill().pass_time(Timing().lease_seconds - 0.01)
    assert pair.released() == []
    pair.pass_time(0.01)
    assert pair.released() == ["p-1"]
    assert pair.ends() == [("producer", End.EXPIRED, Reason.LEASE_EXPIRED)]


def test_orphans_take_nothing_from_others():
    """A thousand registrations for requests that never come: the next one is served at once, and they end."""
    producer = Producer(16, Timing())
    for number in range(1000):
        key = TransferKey(f"orphan-{number}")
        blocks = tuple(range(10 + 3 * number, 13 + 3 * number))
        producer.handle(key, RegisterReceived(CONSUMER, register(key=key, blocks=blocks)), 0.0)
    producer.handle(KEY, announced(), 0.0)
    producer.handle(KEY, RegisterReceived(CONSUMER, register()), 0.0)
    (write,) = [each for each in producer.handle(KEY, PrefillFinished((1, 2, 3)), 0.0) if isinstance(each, StartWrite)]
    assert write.key == KEY
    ended = [each for each in producer.fire(Timing().orphan_seconds, Timing().orphan_seconds) if is_ended(each)]
    assert len(ended) == 1000


def is_ended(action: object) -> bool:
    return isinstance(action, SendMessage) and isinstance(action.message, Ended)


def test_registration_after_the_lease_is_told_expired():
    """A late D hears `expired` and computes for itself."""
    pair = Pair().announce().finish_prefill().pass_time(Timing().lease_seconds).wait().deliver()
    assert ("consumer", End.EXPIRED, Reason.LEASE_EXPIRED) in pair.ends()
    assert pair.received() == [("d-1", False)]


def test_all_expired_leases_are_freed_on_one_tick():
    """A live lease in front of expired ones keeps none of them."""
    producer = Producer(16, Timing(lease_seconds=10))
    keys = [TransferKey(f"t-{number}") for number in range(5)]
    for number, key in enumerate(keys):
        producer.handle(key, announced(f"p-{number}"), 0.0)
    for number, key in reversed(list(enumerate(keys))):
        producer.handle(key, PrefillFinished((number,)), 0.0 if number else 5.0)
    released = {each.request_id for each in producer.fire(10.0, 10.0) if isinstance(each, ReleaseRequest)}
    assert released == {"p-1", "p-2", "p-3", "p-4"}
    assert producer.next_deadline() == 15.0


@pytest.mark.parametrize("stage", ["computing", "held"])
def test_abort_on_the_consumer_before_writing_frees_both(stage):
    """D's request is aborted while it waits: D's blocks are free after P's answer, and P's too."""
    pair = Pair().announce().wait().deliver() if stage == "computing" else Pair().announce().wait()
    pair.abort_request()
    assert pair.received() == []
    pair.deliver()
    assert pair.received() == [("d-1", False)]
    pair.finish_prefill().give_up()
    assert pair.released() == ["p-1"]
    assert pair.started() == []


def test_abort_while_writing_waits_for_what_is_in_flight():
    """NIXL cannot cancel: D's blocks stay reserved until P's WRITEs are over."""
    pair = Pair().announce().finish_prefill().wait().deliver().abort_request().deliver()
    assert pair.started()[-1] == StopPosting(KEY)
    assert pair.received() == []
    assert pair.released() == []
    pair.writes_done().deliver()
    assert pair.received() == [("d-1", False)]
    pair.give_up()
    assert pair.released() == ["p-1"]
    assert pair.ends() == [
        ("consumer", End.CANCELLED, Reason.CONSUMER_GONE),
        ("producer", End.CANCELLED, Reason.CONSUMER_GONE),
    ]


def test_abort_while_reading_waits_for_what_is_in_flight():
    """D's own READs still land in its blocks after an abort; neither side frees before they have."""
    pair = Pair().announce().finish_prefill().wait(waiting(PULL)).deliver().abort_request().deliver()
    assert pair.started()[-1] == StopPosting(KEY)
    assert pair.received() == []
    assert pair.released() == []
    pair.reads_done().deliver().give_up()
    assert pair.received() == [("d-1", False)]
    assert pair.released() == ["p-1"]


def test_abort_before_the_producer_is_known_frees_at_once():
    """P has not learned D's blocks, so they are free; P still hears that nobody wants its own."""
    pair = Pair()
    pair.announce().finish_prefill()
    pair.consume(waiting())
    pair.abort_request()
    assert pair.received() == [("d-1", False)]
    pair.consume(PeerReady(PRODUCER)).deliver().give_up()
    assert pair.released() == ["p-1"]


@pytest.mark.parametrize("stage", ["waiting", "registered", "writing", "cancelling"])
def test_decline_of_a_live_transfer_changes_nothing(stage):
    """It is told of the same request a second time."""
    pair = Pair().announce().finish_prefill()
    pair.consume(waiting())
    if stage != "waiting":
        pair.consume(PeerReady(PRODUCER))
    if stage in {"writing", "cancelling"}:
        pair.deliver()
    if stage == "cancelling":
        pair.abort_request()
    before = pair.consumer.state(KEY)
    pair.consume(RequestDeclined(0, Reason.CONSUMER_GONE))
    assert pair.consumer.state(KEY) is before


def test_abort_that_crosses_the_completion_is_reported_once():
    """P completes while D's cancel is on its way."""
    pair = Pair().announce().finish_prefill().wait().deliver().abort_request()
    pair.writes_done().deliver()
    assert pair.received() == [("d-1", False)]
    assert pair.released() == ["p-1"]


def test_write_failure_reaches_the_consumer():
    """P's WRITE fails: D is told, with the reason."""
    pair = Pair().announce().finish_prefill().wait().deliver().writes_fail().deliver()
    assert pair.received() == [("d-1", False)]
    pair.give_up()
    assert pair.ends() == [("consumer", End.FAILED, Reason.TRANSPORT), ("producer", End.FAILED, Reason.TRANSPORT)]
    assert pair.released() == ["p-1"]


def test_read_failure_frees_the_producer():
    """D's READ fails: P frees its blocks."""
    pair = Pair().announce().finish_prefill().wait(waiting(PULL)).deliver().reads_fail().deliver().give_up()
    assert pair.received() == [("d-1", False)]
    assert pair.released() == ["p-1"]


@pytest.mark.parametrize("mode", [PUSH, PULL])
@pytest.mark.parametrize("stage", ["computing", "moving"])
def test_consumer_dies(mode, stage):
    """P frees its blocks when nothing of its own is in flight and no other one has come."""
    pair = Pair().announce().wait(waiting(mode)).deliver()
    if stage == "moving":
        pair.finish_prefill().deliver()
    pair.kill_consumer()
    if stage == "computing":
        pair.finish_prefill()
    elif mode is PUSH:
        assert pair.give_up().released() == []
        pair.writes_fail()
    pair.give_up()
    assert pair.released() == ["p-1"]
    assert pair.ends() == [("producer", End.FAILED, Reason.PEER_LOST)]


@pytest.mark.parametrize("mode", [PUSH, PULL])
@pytest.mark.parametrize("stage", ["computing", "moving"])
def test_producer_dies(mode, stage):
    """D's request goes on without P; its own READs must be over first."""
    pair = Pair().announce().wait(waiting(mode)).deliver()
    if stage == "moving":
        pair.finish_prefill().deliver()
    pair.kill_producer()
    if mode is PULL and stage == "moving":
        assert pair.received() == []
        pair.reads_fail()
    assert pair.received() == [("d-1", False)]
    assert pair.ends()[-1] == ("consumer", End.FAILED, Reason.PEER_LOST)


def test_deadline_of_the_consumer_asks_the_producer_to_be_quiet():
    """After the deadline D's blocks are free only when P has said so."""
    pair = Pair(Timing(deadline_seconds=50)).announce().wait().deliver().pass_time(50)
    assert pair.received() == []
    pair.deliver()
    assert pair.received() == [("d-1", False)]
    assert ("consumer", End.FAILED, Reason.DEADLINE) in pair.ends()


def test_newer_attempt_supersedes_before_anything_is_written():
    """P tells the old D, and writes to the new one only."""
    other = PeerName("D2/0/a")
    pair = Pair().announce().wait().deliver()
    pair.produce(RegisterReceived(other, register(attempt=1, blocks=(4, 5, 6)))).deliver_to_consumer()
    assert pair.ends() == [("consumer", End.SUPERSEDED, Reason.NEWER_ATTEMPT)]
    pair.finish_prefill()
    assert pair.started() == [StartWrite(KEY, other, (1, 2, 3), (4, 5, 6))]


def test_older_attempt_is_refused():
    """A registration of attempt 0 that arrives after attempt 1 gets nothing."""
    other = PeerName("D2/0/a")
    pair = Pair().announce()
    pair.produce(RegisterReceived(other, register(attempt=1, blocks=(4, 5, 6))))
    pair.wait().deliver()
    assert pair.ends() == [("consumer", End.SUPERSEDED, Reason.NEWER_ATTEMPT)]
    pair.finish_prefill()
    assert pair.started() == [StartWrite(KEY, other, (1, 2, 3), (4, 5, 6))]


def test_cancel_of_an_old_attempt_does_not_stop_the_new_one():
    """The old D's cancel is answered, and the new D's transfer goes on."""
    other = PeerName("D2/0/a")
    pair = Pair().announce().wait().deliver()
    pair.produce(RegisterReceived(other, register(attempt=1))).finish_prefill()
    pair.produce(CancelReceived(CONSUMER, 0, Reason.CONSUMER_GONE))
    assert SendMessage(CONSUMER, Quiesced(KEY, 0)) in pair.actions()
    assert pair.producer.state(KEY) is ProducerState.WRITING


def test_second_consumer_of_a_finished_transfer_is_not_told_completed():
    """`completed` is for the attempt whose blocks were written, and for no other."""
    pair = Pair().announce().finish_prefill().wait().deliver().writes_done().deliver()
    actions = pair.producer.handle(KEY, RegisterReceived(PeerName("D2/0/a"), register()), pair.now)
    (answer,) = actions
    assert answer.message.end is End.FAILED


def test_lost_end_is_repeated_on_the_heartbeat():
    """The connection broke with `Ended` on it: D's heartbeat gets it again."""
    pair = Pair().announce().finish_prefill().wait().deliver().writes_done()
    pair.to_consumer.clear()
    pair.heartbeat().deliver()
    assert pair.received() == [("d-1", True)]


def test_lost_location_is_repeated_on_the_heartbeat():
    """The same for where the blocks are."""
    pair = Pair().announce().wait(waiting(PULL)).deliver().finish_prefill()
    pair.to_consumer.clear()
    pair.heartbeat().deliver()
    assert pair.started() == [StartRead(KEY, PRODUCER, (7, 8, 9), (1, 2, 3))]


def test_lost_registration_is_found_on_the_heartbeat():
    """P knows nothing of what D waits for, and says so."""
    pair = Pair().wait()
    pair.to_producer.clear()
    pair.heartbeat().deliver()
    assert pair.received() == [("d-1", False)]
    assert pair.producer.state(KEY) is None


def test_registration_that_was_denied_is_never_written_to():
    """D gives its blocks away when it hears `unknown`: a `Register` that was overtaken gets nothing."""
    pair = Pair().announce().finish_prefill().wait()
    (late,) = pair.to_producer
    pair.to_producer.clear()
    pair.heartbeat().deliver()
    assert pair.received() == [("d-1", False)]
    pair.to_producer.append(late)
    pair.deliver()
    assert pair.started() == []
    assert pair.producer.state(KEY) is ProducerState.HELD


def test_lost_cancel_is_repeated_on_the_heartbeat():
    """D's blocks do not stay reserved because one message was lost."""
    pair = Pair().announce().wait().deliver().abort_request()
    pair.to_producer.clear()
    pair.heartbeat().deliver()
    assert pair.received() == [("d-1", False)]


def test_producer_ends_what_the_consumer_no_longer_waits_for():
    """D's `Done` was lost: its heartbeat no longer names the transfer, and P's blocks are freed."""
    pair = Pair().announce().finish_prefill().wait(waiting(PULL)).deliver().reads_done()
    pair.to_producer.clear()
    pair.pass_time(2.0).heartbeat().deliver().give_up()
    assert pair.released() == ["p-1"]


def test_one_request_for_several_consumers_is_released_after_the_last():
    """With n = 2 P keeps the blocks until both choices have their copy."""
    producer = Producer(16, Timing())
    first, second = TransferKey("t-1", 0), TransferKey("t-1", 1)
    for key in (first, second):
        producer.handle(key, announced(), 0.0)
        blocks = tuple(10 * key.consumer_index + each for each in (7, 8, 9))
        producer.handle(key, RegisterReceived(CONSUMER, register(key=key, blocks=blocks)), 0.0)
        producer.handle(key, PrefillFinished((1, 2, 3)), 0.0)
    assert ReleaseRequest("p-1") not in producer.handle(second, WritesDone(1, 1), 1.0)
    assert ReleaseRequest("p-1") in producer.handle(first, WritesDone(1, 1), 2.0)


def test_ends_are_remembered_for_a_while_and_then_forgotten():
    """A producer that serves for weeks does not grow."""
    pair = Pair().announce().finish_prefill().wait().deliver().writes_done().deliver()
    assert pair.producer.state(KEY) is ProducerState.ENDED
    pair.pass_time(Timing().memory_seconds)
    assert pair.producer.state(KEY) is None
    assert pair.producer.next_deadline() is None


@pytest.mark.parametrize("event", [PrefillFinished((4, 5, 6)), PrefillAborted()])
def test_second_request_of_the_same_name_outlives_the_memory_of_the_first(event):
    """P's engine computes it for longer than the first one's end is remembered: it is known and released even so."""
    pair = Pair().announce().abort_prefill()
    assert pair.released() == ["p-1"]
    pair.announce(announced("p-2")).pass_time(Timing().memory_seconds + 1)
    pair.advance_prefill(0, 4).produce(event)
    assert pair.released() == ["p-1", "p-2"]
    pair.pass_time(Timing().memory_seconds)
    assert pair.producer.state(KEY) is None


def test_second_request_of_the_same_name_is_not_given_the_end_of_the_first():
    """P still answers `completed` for the name: a request that took it for its own would decode from empty blocks."""
    pair = Pair().announce().wait().deliver().finish_prefill().deliver().writes_done().deliver()
    assert pair.received() == [("d-1", True)]
    pair.announce(announced("p-2")).wait(waiting(request="d-2")).heartbeat().deliver()
    assert pair.received()[1:] == [("d-2", False)]
    pair.finish_prefill().deliver()
    assert pair.released() == ["p-1", "p-2"]


def test_a_name_may_be_used_again_when_nobody_remembers_it():
    """D remembers for longer than P."""
    pair = Pair().announce().wait().deliver().finish_prefill().deliver().writes_done().deliver()
    pair.pass_time(Timing().memory_seconds).pass_time(Timing().memory_seconds)
    pair.announce(announced("p-2")).wait(waiting(request="d-2")).deliver()
    pair.finish_prefill().deliver().writes_done().deliver()
    assert [is_ok for _, is_ok in pair.received()] == [True, True]


def test_status_of_a_live_transfer_changes_nothing():
    """A heartbeat is not an event; while P writes, it is answered, since WRITEs may land only while D knows of them."""
    pair = Pair().announce().wait().deliver()
    assert pair.producer.handle(KEY, StatusAsked(CONSUMER, 0), pair.now) == []
    pair.finish_prefill().deliver()
    before = pair.producer.state(KEY)
    answer = SendMessage(CONSUMER, Writing(KEY, 0))
    assert pair.producer.handle(KEY, StatusAsked(CONSUMER, 0), pair.now) == [answer]
    assert pair.producer.state(KEY) is before


def test_lost_word_of_a_write_comes_again_with_the_heartbeat():
    """D never heard that P writes, and so would never drive its side of the transport."""
    pair = Pair().announce().wait().deliver().finish_prefill()
    pair.to_consumer.clear()
    assert pair.consumer.state(KEY) is ConsumerState.ACCEPTED
    pair.heartbeat().deliver()
    assert pair.consumer.state(KEY) is ConsumerState.RECEIVING
    assert pair.writes_done().deliver().received() == [("d-1", True)]


def test_messages_of_a_push_in_order():
    """What D sees of a push: accepted, writing, ended."""
    pair = Pair().announce().wait().deliver_to_producer().finish_prefill().writes_done()
    assert [message for _, message in pair.to_consumer] == [
        Accepted(KEY, 0),
        Writing(KEY, 0),
        Ended(KEY, 0, End.COMPLETED, Reason.NONE, "", 300, 3, PrefillTimes(0.0, 0.0, ((0.0, 3),))),
    ]


def test_location_with_the_wrong_number_of_blocks_is_not_read():
    """P offers two blocks for three: D reads nothing and fails with the reason."""
    pair = Pair().announce().wait(waiting(PULL)).deliver()
    pair.consume(Located(KEY, 0, (1, 2), 16)).deliver()
    assert pair.started() == []
    assert ("consumer", End.FAILED, Reason.INVALID_BLOCKS) in pair.ends()


def test_an_end_costs_the_same_however_many_there_were_of_late():
    """A decode worker remembers minutes of them; to look at all each time took longer with each."""
    consumer = Pair().consumer

    def one_more(number: int) -> None:
        key = TransferKey(f"t-{number}")
        for event in (waiting(), RequestAborted(), PeerReady(PRODUCER)):
            consumer.handle(key, event, 1.0)
        assert consumer.state(key) is None

    for number in range(5_000):
        one_more(number)
    tracemalloc.start()
    try:
        one_more(5_000)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 50_000
