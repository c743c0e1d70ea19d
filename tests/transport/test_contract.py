"""One contract, two transports: the in-memory twin and NIXL go through the same cases."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvberth.layout import Region, plan_runs
from kvberth.transport import Direction, MemoryFabric, MemoryTransport, Transport, TransportError

NUM_BLOCKS, BLOCK_BYTES = 64, 512


class End:
    """One side: memory, its region and its agent."""

    def __init__(self, transport: Transport, fill: int) -> None:
        self.memory = np.full((2, NUM_BLOCKS, BLOCK_BYTES), fill, dtype=np.uint8)
        self.transport = transport
        self.regions = [
            Region(address=layer.ctypes.data, block_stride=BLOCK_BYTES, block_length=BLOCK_BYTES)
            for layer in self.memory
        ]
        transport.register(self.regions, NUM_BLOCKS)


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def ends(request) -> Iterator[tuple[End, End, str]]:
    """Two agents that know each other, and the second one's name."""
    if request.param == "memory":
        fabric = MemoryFabric(polls_until_done=2)
        first, second = MemoryTransport("one", fabric), MemoryTransport("two", fabric)
    else:
        nixl = pytest.importorskip("kvberth.transport.nixl", reason="NIXL is not installed", exc_type=ImportError)
        salt = time.monotonic_ns()
        first = nixl.NixlTransport(f"one-{salt}", nixl.MemoryType.HOST)
        second = nixl.NixlTransport(f"two-{salt}", nixl.MemoryType.HOST)
    one, two = End(first, 1), End(second, 2)
    first_name = second.add_peer(first.metadata())
    second_name = first.add_peer(second.metadata())
    assert first_name != second_name
    yield one, two, second_name
    first.close()
    second.close()


def finish(one: End, two: End, handle) -> None:
    """Drive both sides until the transfer is done."""
    deadline = time.monotonic() + 10
    while not one.transport.is_done(handle):
        two.transport.progress()
        assert time.monotonic() < deadline, "the transfer does not end"
    one.transport.release(handle)


def test_write_moves_the_blocks_and_nothing_else(ends):
    """Blocks 1, 2 and 5 of one arrive in 7, 8 and 3 of two."""
    one, two, peer = ends
    one.memory[:, 1:6] = np.arange(11, 16, dtype=np.uint8)[None, :, None]
    handle = one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [1, 2, 5], [7, 8, 3]))
    finish(one, two, handle)
    for block, value in ((7, 11), (8, 12), (3, 15)):
        assert (two.memory[:, block] == value).all()
    untouched = [block for block in range(NUM_BLOCKS) if block not in {3, 7, 8}]
    assert (two.memory[:, untouched] == 2).all()


def test_read_moves_the_other_way(ends):
    """One reads block 4 of two into its block 60."""
    one, two, peer = ends
    two.memory[:, 4] = 99
    handle = one.transport.post(Direction.READ, peer, plan_runs(one.regions, two.regions, [60], [4]))
    finish(one, two, handle)
    assert (one.memory[:, 60] == 99).all()
    assert (one.memory[:, :60] == 1).all()


def test_several_transfers_at_once(ends):
    """Handles are told apart."""
    one, two, peer = ends
    one.memory[:, :8] = np.arange(30, 38, dtype=np.uint8)[None, :, None]
    handles = [
        one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [block], [20 + block]))
        for block in range(8)
    ]
    for handle in reversed(handles):
        finish(one, two, handle)
    assert two.memory[0, 20:28, 0].tolist() == list(range(30, 38))


def test_done_stays_done(ends):
    """Asking again before the release is allowed."""
    one, two, peer = ends
    handle = one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [0], [0]))
    deadline = time.monotonic() + 10
    while not one.transport.is_done(handle):
        two.transport.progress()
        assert time.monotonic() < deadline
    assert one.transport.is_done(handle)
    one.transport.release(handle)


def test_unknown_peer_is_an_error(ends):
    """Nothing is posted to somebody unknown."""
    one, two, _ = ends
    with pytest.raises(TransportError):
        one.transport.post(Direction.WRITE, "nobody", plan_runs(one.regions, two.regions, [0], [0]))


def test_unregistered_memory_is_an_error(ends):
    """Nothing is read from or written to memory that was not registered."""
    one, two, peer = ends
    stray = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    foreign = [Region(address=stray.ctypes.data, block_stride=BLOCK_BYTES, block_length=BLOCK_BYTES)]
    with pytest.raises(TransportError):
        one.transport.post(Direction.WRITE, peer, plan_runs(foreign, two.regions[:1], [0], [0]))
    with pytest.raises(TransportError):
        one.transport.post(Direction.READ, peer, plan_runs(one.regions[:1], foreign, [0], [0]))


def test_rubbish_metadata_is_an_error(ends):
    """A peer's card that is not one."""
    one, _, _ = ends
    with pytest.raises(TransportError):
        one.transport.add_peer(b"not an agent")


def test_removed_peer_is_unknown(ends):
    """After `remove_peer` nothing can be posted to it, and it can come back."""
    one, two, peer = ends
    one.transport.remove_peer(peer, is_live=False)
    with pytest.raises(TransportError):
        one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [0], [0]))
    assert one.transport.add_peer(two.transport.metadata()) == peer
    finish(one, two, one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [0], [9])))
    assert (two.memory[:, 9] == 1).all()


def test_what_is_read_from_a_removed_peer_comes_to_an_end(ends):
    """Done, or failed, and then nothing of it arrives any more; and the peer can be back before that."""
    one, two, peer = ends
    for is_back in (False, True):
        handle = one.transport.post(Direction.READ, peer, plan_runs(one.regions, two.regions, [60], [4]))
        one.transport.remove_peer(peer, is_live=True)
        if is_back:
            assert one.transport.add_peer(two.transport.metadata()) == peer
        try:
            finish(one, two, handle)
        except TransportError:
            one.transport.release(handle)
            arrived = one.memory.copy()
            two.memory[:, 4] += 1
            for _ in range(50):
                two.transport.progress()
                one.transport.progress()
            assert (one.memory == arrived).all()
        if not is_back:
            with pytest.raises(TransportError):
                one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [0], [0]))
            assert one.transport.add_peer(two.transport.metadata()) == peer
        finish(one, two, one.transport.post(Direction.WRITE, peer, plan_runs(one.regions, two.regions, [0], [9])))


def test_a_peer_is_removed_once(ends):
    """The second time it is unknown."""
    one, _, peer = ends
    one.transport.remove_peer(peer, is_live=True)
    with pytest.raises(TransportError, match=peer):
        one.transport.remove_peer(peer, is_live=True)
