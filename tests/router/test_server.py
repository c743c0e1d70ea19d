"""How the router's server writes."""

import asyncio

import pytest

from kvberth.router.server import _Gathering

pytestmark = pytest.mark.anyio


class Transport:
    def __init__(self):
        self.written = []

    def get_extra_info(self, name):
        return {"sslcontext": object()}[name]  # bytes go through its `write`

    def is_closing(self):
        return "closed" in self.written

    def write(self, data):
        self.written.append(data)

    def close(self):
        self.written.append("closed")


@pytest.fixture
async def gathering():
    return _Gathering(Transport(), asyncio.get_running_loop())


async def test_a_head_goes_out_with_what_follows_at_once(gathering):
    """One write, in order."""
    gathering.write(b"head")
    gathering.write_now(b"first")
    gathering.write_now(b"second")
    assert gathering._transport.written == [b"headfirst", b"second"]


async def test_a_head_alone_does_not_wait(gathering):
    """Nothing has followed in this turn of the loop: it goes with its end, and is not sent again."""
    gathering.write(b"head")
    assert gathering._transport.written == []
    await asyncio.sleep(0)
    gathering.flush()
    assert gathering._transport.written == [b"head"]


async def test_nothing_is_written_to_who_has_gone(gathering):
    """A head may have been gathered just before."""
    gathering.write(b"head")
    gathering._transport.close()
    await asyncio.sleep(0)
    gathering.flush()
    assert gathering._transport.written == ["closed"]


async def test_a_close_waits_for_what_is_gathered(gathering):
    """And what is large is not gathered: the transport has to say when it is full."""
    gathering.write(b"a")
    gathering.write(b"b" * 100_000)
    gathering.write(b"c")
    gathering.close()
    assert gathering._transport.written == [b"a" + b"b" * 100_000, b"c", "closed"]
