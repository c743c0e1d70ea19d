"""Where the time of a handoff went, as both sides tell it."""

import pytest
from tests.protocol.pair import Pair, announced, waiting

from kvberth.protocol import EndRecord, Timeline, TransferMode
from kvberth.protocol.ids import Role


def timeline(pair: Pair) -> Timeline:
    """Of the one report."""
    (report,) = pair.reports()
    assert report.timeline is not None
    return report.timeline


def test_streamed_parts_stand_before_the_end_of_the_prefill():
    """Two parts go while P computes; what is left after its last chunk is one block and 10 ms."""
    pair = Pair().wait().deliver()
    pair.pass_time(1.0).announce().deliver()
    pair.pass_time(1.0).advance_prefill(0, 1).deliver()
    pair.pass_time(1.0).advance_prefill(1, 2).deliver()
    pair.pass_time(1.0).advance_prefill(2, 3, is_complete=True).deliver()
    pair.pass_time(0.01).finish_prefill().writes_done().deliver()
    told = timeline(pair)
    assert (told.registered, told.accepted) == (0.0, 0.0)
    assert told.prefill_announced == pytest.approx(1.0)
    assert told.moving == pytest.approx(2.0)
    assert told.prefill_done == pytest.approx(4.0)
    assert told.ended == pytest.approx(4.01)
    assert told.after_prefill == pytest.approx(0.01)
    assert [(round(moment, 6), blocks) for moment, blocks in told.writes] == [(2.0, 1), (3.0, 1), (4.0, 1)]


def test_preempted_parts_are_not_told():
    """What was written before a preemption counts for nothing."""
    pair = Pair().wait().announce().deliver()
    pair.pass_time(1.0).advance_prefill(0, 1, 2).restart_prefill().deliver()
    pair.writes_done().pass_time(1.0).advance_prefill(0, 11, 12, 13, is_complete=True).deliver()
    pair.finish_prefill((11, 12, 13)).writes_done().deliver()
    assert [(round(moment, 6), blocks) for moment, blocks in timeline(pair).writes] == [(2.0, 3)]


def test_pull_tells_when_the_prompt_was_ready_and_when_it_was_read():
    """P had it for a second before D came; the reading took two."""
    pair = Pair().announce().finish_prefill().pass_time(1.0)
    pair.wait(waiting(TransferMode.PULL)).deliver().pass_time(2.0).reads_done().deliver()
    told = timeline(pair)
    assert told.prefill_announced == told.prefill_done == pytest.approx(-1.0)
    assert told.moving == 0.0
    assert told.after_prefill == told.ended == pytest.approx(2.0)
    assert told.writes == ()


def test_failed_wait_tells_how_long_it_was():
    """No end of the prefill is known."""
    pair = Pair().wait().announce().deliver().pass_time(1.0).abort_prefill().deliver()
    told = timeline(pair)
    assert told.ended == pytest.approx(1.0)
    assert told.prefill_done is None
    assert told.after_prefill is None


def test_both_records_tell_what_the_handoff_took_beyond_the_prefill():
    """And D's how many block-seconds it had reserved: three blocks for 1.5 s."""
    pair = Pair().wait().announce(announced()).deliver().pass_time(1.0).finish_prefill().deliver()
    pair.pass_time(0.5).writes_done().deliver()
    records = {each.role: each for each in pair.actions() if isinstance(each, EndRecord)}
    assert records[Role.PRODUCER].after_prefill_seconds == pytest.approx(0.5)
    assert records[Role.CONSUMER].after_prefill_seconds == pytest.approx(0.5)
    assert records[Role.PRODUCER].reserved_block_seconds == 0.0
    assert records[Role.CONSUMER].reserved_block_seconds == pytest.approx(4.5)
