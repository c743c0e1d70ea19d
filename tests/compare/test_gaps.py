"""Gaps between tokens beside somebody else's transfer."""

import pytest
from tests.compare.conftest import record

from kvberth.compare.gaps import gaps_beside, streams, windows


def test_streams_have_the_times_of_their_chunks():
    """From the start of the measurement, in milliseconds; a request without a token has none."""
    answers = [record(2, 100.0, 10.0), record(3, error="timeout: x")]
    (stream,) = streams(answers)
    assert (stream.index, stream.times_ms) == (2, (2100.0, 2110.0, 2120.0))


def test_a_transfer_ends_a_step_before_the_first_token():
    """Its window is as long as the transfer, and the step."""
    (window,) = windows([record(1, 100.0)], step_ms=10.0, transfer_ms=30.0)
    assert (window.start_ms, window.end_ms) == (1060.0, 1100.0)


def test_the_longest_gap_beside_a_transfer():
    """Of other requests only, and only while it lasts."""
    victim = record(0, 50.0, itl_ms=[6.0, 6.0, 80.0, 6.0, 90.0])  # 50, 56, 62, 142, 148, 238
    arriving = record(1, 130.0, sent_s=0.0, itl_ms=[6.0, 300.0])
    answers = [victim, arriving]
    found = windows(answers, step_ms=6.0, transfer_ms=40.0)
    beside = gaps_beside(streams(answers), [window for window in found if window.index == 1])
    assert beside == pytest.approx([80.0])


def test_without_another_stream_nothing_is_known():
    """A transfer that disturbed nobody counts neither for nor against."""
    answers = [record(0), record(1)]
    assert gaps_beside(streams(answers), windows(answers, step_ms=6.0, transfer_ms=1.0)) == []
