"""Streams on their way: the same bytes, cut where events end."""

import pytest

from kvberth.router.answer import WholeEvents


def events_of(*chunks):
    """What is passed on of these chunks, and of the half event behind the last one."""
    events = WholeEvents()
    return [whole for whole in [*map(events.cut, chunks), events.rest] if whole]


@pytest.mark.parametrize(
    ("chunks", "passed"),
    [
        ([b"data: a\n\n", b"data: b\n\n"], [b"data: a\n\n", b"data: b\n\n"]),
        ([b"data: a\n\ndata: b\n\n"], [b"data: a\n\ndata: b\n\n"]),
        ([b"data: a\n\nda", b"ta: b\n\n"], [b"data: a\n\n", b"data: b\n\n"]),
        ([b"da", b"ta", b": a\n", b"\n"], [b"data: a\n\n"]),
        ([b"data: a\r\n\r\nda", b"ta: b\r\n\r\n"], [b"data: a\r\n\r\n", b"data: b\r\n\r\n"]),
        ([b"data: a\n\n", b"no end"], [b"data: a\n\n", b"no end"]),
    ],
)
def test_chunks_are_cut_where_events_end(chunks, passed):
    """Nothing is lost or changed; a whole chunk of whole events is passed on as it is."""
    assert events_of(*chunks) == passed
    assert b"".join(passed) == b"".join(chunks)


def test_a_half_event_waits_for_its_end():
    """Where there is none, what comes behind it, an error event, must not become part of it."""
    events = WholeEvents()
    assert events.cut(b"data: a\n\ndata: {") == b"data: a\n\n"
    assert events.cut(b'"b') == b""
    assert events.rest == b'data: {"b'


def test_an_event_without_an_end_is_not_collected():
    """What grows beyond eight mebibytes is passed on in pieces."""
    chunks = [b"data: "] + [b"x" * 3_000_000] * 10
    passed = events_of(*chunks)
    assert b"".join(passed) == b"".join(chunks)
    assert max(map(len, passed)) < 12_000_000
