"""Blocks that are not the peer's to name, between two processes over NIXL: refused with a reason, and never touched."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("kvberth.transport.nixl", reason="NIXL is not installed", exc_type=ImportError)

from tests.mover.peer_process import NUM_BLOCKS, value_of
from tests.mover.test_two_processes import Consumer, Peer, free_port

from kvberth.protocol import TransferMode

pytestmark = pytest.mark.nixl
PUSH, PULL = TransferMode.PUSH, TransferMode.PULL


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = Peer(free_port())
    yield peer
    peer.close()


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    """Another one for each test: what P has refused is refused for good."""
    consumer = Consumer()
    yield consumer
    consumer.mover.stop()


def assert_arrived(consumer: Consumer, transfer_id: str, blocks: tuple[int, ...]) -> None:
    """Its blocks hold what P computed, and no other byte of D's has changed."""
    expected = np.full_like(consumer.memory, 255)
    for position, block in enumerate(blocks):
        expected[:, block] = value_of(transfer_id, position)
    assert (consumer.memory == expected).all()


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ((4, 5, NUM_BLOCKS), f"block {NUM_BLOCKS} is outside of the region's {NUM_BLOCKS} blocks"),
        ((4, -1, 5), f"block -1 is outside of the region's {NUM_BLOCKS} blocks"),
        ((4, 5, 4), "a block is named twice"),
        ((4, 8, 5), "block 8 is registered for another transfer, which is not over"),
    ],
    ids=["beyond", "before", "twice", "another's"],
)
def test_nothing_is_written_for_a_registration_that_is_refused(request, peer, consumer, blocks, why):
    """D hears why; a transfer beside it gets its bytes, and its blocks are free for the next one then."""
    good, bad, following = (f"{name}-{request.node.callspec.id}" for name in ("good", "bad", "next"))
    peer.tell(f"announce {good}", f"announce {bad}")
    consumer.wait_for(peer, good, PUSH, (7, 8, 9))
    consumer.wait_for(peer, bad, PUSH, blocks)
    report = consumer.report()
    assert (report.request_id, report.ok, report.reason, report.detail) == (bad, False, "invalid_blocks", why)
    peer.tell(f"finish {bad}", f"finish {good}")
    assert consumer.report().ok
    peer.expect(f"released {good}")
    assert_arrived(consumer, good, (7, 8, 9))
    consumer.memory[:] = 255
    peer.tell(f"announce {following}", f"finish {following}")
    consumer.wait_for(peer, following, PUSH, (4, 8, 5))
    assert consumer.report().ok
    assert_arrived(consumer, following, (4, 8, 5))


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        ((5, 4, NUM_BLOCKS), f"block {NUM_BLOCKS} is outside of the region's {NUM_BLOCKS} blocks"),
        ((5, 4, 4), "a block is named twice"),
        ((5, 4), "the prefill worker offers 2 blocks of 16, 3 are needed"),
    ],
    ids=["beyond", "twice", "too few"],
)
def test_nothing_is_read_from_blocks_that_cannot_be(request, peer, consumer, caplog, offered, why):
    """A prefill worker's offer, in pull; the log says why."""
    odd = f"odd-{request.node.callspec.id}"
    peer.tell(f"announce {odd}")
    consumer.wait_for(peer, odd, PULL, (7, 8, 9))
    with caplog.at_level(logging.WARNING):
        peer.tell(f"offer {','.join(map(str, offered))} {odd}")
        report = consumer.report()
    assert not report.ok
    assert why in report.detail
    assert why in caplog.text
    assert (consumer.memory == 255).all()
