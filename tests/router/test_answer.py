"""Streams on their way: the same bytes, cut where events end."""

import pytest

from kvberth.router.answer import Streamed, whole_events

pytestmark = pytest.mark.anyio


class Source:
    """Gives some chunks and then ends, or breaks."""

    def __init__(self, chunks, breaks=False):
        self.chunks, self.breaks = list(chunks), breaks

    async def receive(self):
        if self.chunks:
            return self.chunks.pop(0)
        if self.breaks:
            raise ConnectionResetError
        return b""

    def close(self):
        self.chunks = []


async def events_of(*chunks):
    return [event async for event in whole_events(Streamed(200, (), chunks[0], Source(chunks[1:])))]


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
async def test_chunks_are_cut_where_events_end(chunks, passed):
    """Nothing is lost or changed; a whole chunk of whole events is passed on as it is."""
    assert await events_of(*chunks) == passed
    assert b"".join(passed) == b"".join(chunks)


async def test_a_half_event_is_lost_when_the_source_breaks():
    """What comes behind it, an error event, must not become part of it."""
    events = whole_events(Streamed(200, (), b"data: a\n\ndata: {", Source([b'"b'], breaks=True)))
    assert await anext(events) == b"data: a\n\n"
    with pytest.raises(ConnectionResetError):
        await anext(events)


async def test_an_event_without_an_end_is_not_collected():
    """What grows beyond eight mebibytes is passed on in pieces."""
    chunks = [b"data: "] + [b"x" * 3_000_000] * 10
    passed = await events_of(*chunks)
    assert b"".join(passed) == b"".join(chunks)
    assert max(map(len, passed)) < 12_000_000
