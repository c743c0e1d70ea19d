"""ZeroMQ's bytes are cut into frames, wherever they are cut by TCP, and meddled with one by one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.drills.zmtp import Frames, Meddler, Meddling

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes(54)
COMMAND = b"\x04\x05READY"
SHORT = b"\x00\x05hello"
LONG = b"\x02" + (300).to_bytes(8, "big") + b"x" * 300
STREAM = GREETING + COMMAND + SHORT + LONG


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_frames_are_the_same_however_the_bytes_come(cuts):
    """What is no message comes as it is; nothing is lost or held back."""
    frames = Frames()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [each for low, high in itertools.pairwise(edges) for each in frames.feed(STREAM[low:high])]
    assert b"".join(piece for piece, _ in pieces) == STREAM
    assert [piece for piece, is_message in pieces if is_message] == [SHORT, LONG]


def test_the_greeting_is_not_held_back():
    """Each side waits for the first bytes of the other's before it sends the rest of its own."""
    frames = Frames()
    assert list(frames.feed(GREETING[:10])) == [(GREETING[:10], False)]
    assert list(frames.feed(GREETING[10:] + COMMAND[:2])) == [(GREETING[10:], False)]


@pytest.mark.parametrize(
    ("meddling", "fate"),
    [
        (Meddling(), [SHORT]),
        (Meddling(drop=1.0), []),
        (Meddling(duplicate=1.0), [SHORT, SHORT]),
    ],
)
def test_fate_of_a_message(meddling, fate):
    """At a share of 1, without doubt."""
    meddler = Meddler(0)
    meddler.meddling = meddling
    assert meddler.fate(SHORT) == fate
    assert meddler.hits == (fate != [SHORT])


def test_corrupted_message_has_its_length_and_one_other_byte():
    """A length that was changed would make all that follows unreadable, which is another fault."""
    meddler = Meddler(0)
    meddler.meddling = Meddling(corrupt=1.0)
    for frame, header in ((SHORT, 2), (LONG, 9)):
        (other,) = meddler.fate(frame)
        assert other[:header] == frame[:header]
        assert len(other) == len(frame)
        assert sum(one != two for one, two in zip(frame, other, strict=True)) == 1


def test_empty_message_cannot_be_corrupted():
    """There is no byte to change."""
    meddler = Meddler(0)
    meddler.meddling = Meddling(corrupt=1.0)
    assert meddler.fate(b"\x00\x00") == [b"\x00\x00"]


def test_shares_are_about_what_was_asked_for():
    """Of many messages."""
    meddler = Meddler(3)
    meddler.meddling = Meddling(drop=0.2)
    assert 700 < sum(len(meddler.fate(SHORT)) for _ in range(1000)) < 900
