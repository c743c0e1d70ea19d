"""A push that follows the prefill; each test is one promise."""

import pytest
from tests.protocol.pair import CONSUMER, KEY, Pair, waiting

from kvberth.protocol import End, Reason, SendMessage, StartRead, StartWrite, StopPosting, TransferMode
from kvberth.protocol.messages import Writing
from kvberth.protocol.producer_states import ProducerState

PULL = TransferMode.PULL
COMPLETED = [("producer", End.COMPLETED, Reason.NONE), ("consumer", End.COMPLETED, Reason.NONE)]


def write(local: tuple[int, ...], remote: tuple[int, ...], *, is_last: bool = False) -> StartWrite:
    return StartWrite(KEY, CONSUMER, local, remote, is_last)


def test_blocks_are_written_as_they_are_computed():
    """Each part goes as soon as it is ready, the last one ends it, and D goes on before P's engine is done."""
    pair = Pair().announce().wait().deliver()
    pair.advance_prefill(0, 1).deliver()
    assert pair.producer.state(KEY) is ProducerState.STREAMING
    pair.advance_prefill(1, 2).deliver()
    pair.advance_prefill(2, 3, is_complete=True).deliver()
    assert pair.started() == [write((1,), (7,)), write((2,), (8,)), write((3,), (9,), is_last=True)]
    writings = [each for each in pair.actions() if isinstance(each, SendMessage) and isinstance(each.message, Writing)]
    assert len(writings) == 1
    pair.writes_done().deliver()
    assert pair.received() == [("d-1", True)]
    assert pair.released() == []
    pair.finish_prefill()
    assert pair.released() == ["p-1"]
    assert pair.ends() == COMPLETED


def test_a_late_registration_gets_all_that_is_ready_at_once():
    """In one part, and then what follows."""
    pair = Pair().announce().advance_prefill(0, 1).advance_prefill(1, 2).wait().deliver()
    assert pair.started() == [write((1, 2), (7, 8))]
    pair.advance_prefill(2, 3, is_complete=True)
    assert pair.started()[1:] == [write((3,), (9,), is_last=True)]


def test_a_registration_behind_the_last_block_does_not_wait_for_the_engine():
    """The KV is complete, though the request has not ended."""
    pair = Pair().announce().advance_prefill(0, 1, 2, 3, is_complete=True).wait().deliver()
    assert pair.started() == [write((1, 2, 3), (7, 8, 9), is_last=True)]


def test_what_the_consumer_has_is_not_streamed():
    """It lacks the last block only: nothing goes before that."""
    pair = Pair().announce().wait(waiting(first_token=32, blocks=(9,))).deliver()
    pair.advance_prefill(0, 1).advance_prefill(1, 2).deliver()
    assert pair.started() == []
    assert pair.producer.state(KEY) is ProducerState.MATCHED
    pair.advance_prefill(2, 3, is_complete=True)
    assert pair.started() == [write((3,), (9,), is_last=True)]


def test_a_pull_waits_for_the_whole_prompt_but_not_for_the_engine():
    """D READs as soon as the last block is computed."""
    pair = Pair().announce().wait(waiting(PULL)).deliver().advance_prefill(0, 1).deliver()
    assert pair.started() == []
    pair.advance_prefill(1, 2, 3, is_complete=True).deliver()
    assert [type(each) for each in pair.started()] == [StartRead]
    pair.reads_done().deliver()
    assert pair.released() == []
    pair.finish_prefill()
    assert pair.released() == ["p-1"]


def test_preemption_begins_anew_when_nothing_is_in_flight():
    """What was written does not count: it may have been read from blocks that were somebody else's."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1).restart_prefill()
    assert pair.started() == [write((1,), (7,)), StopPosting(KEY)]
    pair.advance_prefill(0, 4, 5).deliver()
    assert len(pair.started()) == 2
    pair.writes_done().deliver()
    assert pair.started()[2:] == [write((4, 5), (7, 8))]
    pair.advance_prefill(2, 6, is_complete=True).writes_done().deliver()
    assert pair.received() == [("d-1", True)]


def test_preempted_before_anything_was_written_is_nothing_special():
    """There is nothing to drain."""
    pair = Pair().announce().advance_prefill(0, 1).restart_prefill().wait().deliver()
    assert pair.started() == []
    pair.finish_prefill((4, 5, 6))
    assert pair.started() == [write((4, 5, 6), (7, 8, 9), is_last=True)]


def test_preempted_while_it_drains_and_finished_meanwhile():
    """All of it goes from the final blocks."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1).restart_prefill().advance_prefill(0, 4)
    pair.restart_prefill().finish_prefill((5, 6, 7)).writes_done()
    assert pair.started()[2:] == [write((5, 6, 7), (7, 8, 9), is_last=True)]


def test_aborted_in_mid_stream_ends_when_nothing_is_in_flight():
    """Not before: P's blocks are still read."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1).abort_prefill().deliver()
    assert pair.released() == pair.received() == []
    pair.writes_done().deliver()
    assert pair.released() == ["p-1"]
    assert pair.received() == [("d-1", False)]
    assert [end for _, end, _ in pair.ends()] == [End.FAILED, End.FAILED]


def test_aborted_behind_the_last_block_is_handed_over_all_the_same():
    """The KV is complete and its blocks are kept."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1, 2, 3, is_complete=True).abort_prefill()
    pair.writes_done().deliver()
    assert pair.ends() == COMPLETED
    assert pair.released() == ["p-1"]


@pytest.mark.parametrize("is_done", [True, False])
def test_the_consumer_gives_up_in_mid_stream(is_done):
    """Its blocks are its own again when nothing can land in them; P's follow when its engine is done."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1).deliver().abort_request().deliver()
    assert pair.received() == []
    (pair.writes_done if is_done else pair.writes_fail)().deliver()
    assert pair.received() == [("d-1", False)]
    assert pair.released() == []
    pair.advance_prefill(1, 2).finish_prefill().give_up()
    assert len([each for each in pair.started() if isinstance(each, StartWrite)]) == 1
    assert pair.released() == ["p-1"]


def test_the_consumer_dies_in_mid_stream():
    """P goes on computing, and lets its blocks go at the end of it."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1).kill_consumer()
    pair.writes_fail().advance_prefill(1, 2).finish_prefill().give_up()
    assert pair.released() == ["p-1"]
    assert pair.ends() == [("producer", End.FAILED, Reason.PEER_LOST)]


def test_a_write_fails_in_mid_stream():
    """D hears it and computes for itself; nothing more is written."""
    pair = Pair().announce().wait().deliver().advance_prefill(0, 1).writes_fail().deliver()
    assert pair.received() == [("d-1", False)]
    pair.advance_prefill(1, 2, 3, is_complete=True).finish_prefill().give_up()
    assert len(pair.started()) == 1
    assert pair.released() == ["p-1"]
