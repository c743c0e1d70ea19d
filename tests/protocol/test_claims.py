"""A block of a decode worker is written to by one transfer at a time."""

import pytest
from tests.protocol.pair import BLOCK_SIZE, CONSUMER, announced, name, register

from kvberth.protocol import End, Producer, Reason, SendMessage, StartWrite, Timing, TransferKey, TransferMode
from kvberth.protocol.claims import Claims
from kvberth.protocol.events import (
    CancelReceived,
    PrefillAborted,
    PrefillAdvanced,
    PrefillFinished,
    RegisterReceived,
    WritesDone,
    WritesFailed,
)
from kvberth.protocol.ids import PeerName
from kvberth.protocol.messages import Accepted, Ended, Message

ONE, TWO = TransferKey("one"), TransferKey("two")
PULL = TransferMode.PULL


class P:
    """A producer, and what it has said and written."""

    def __init__(self) -> None:
        self.machine = Producer(BLOCK_SIZE, Timing())
        self.writes: list[StartWrite] = []
        self.now = 100.0

    def handle(self, key: TransferKey, event: object) -> list[Message]:
        """What it says to consumers."""
        actions = self.machine.handle(key, event, self.now)  # type: ignore[arg-type]
        self.writes += [each for each in actions if isinstance(each, StartWrite)]
        return [each.message for each in actions if isinstance(each, SendMessage)]

    def announce(self, key: TransferKey) -> None:
        self.handle(key, announced(str(key)))

    def hears(self, key: TransferKey, blocks: tuple[int, ...], *, peer: PeerName = CONSUMER, **changes: object) -> list:
        return self.handle(key, RegisterReceived(peer, register(key=key, blocks=blocks, **changes)))

    def is_refused(self, key: TransferKey, blocks: tuple[int, ...], block: int, **changes: object) -> bool:
        """With the block that stands in the way."""
        (answer,) = self.hears(key, blocks, **changes)
        assert isinstance(answer, Ended | Accepted)
        if isinstance(answer, Accepted):
            return False
        assert (answer.end, answer.reason) == (End.FAILED, Reason.INVALID_BLOCKS)
        assert f"block {block} is registered for another transfer" in answer.detail
        return True


@pytest.fixture
def p() -> P:
    """Two prompts of three blocks are computed, and the first has its registration."""
    p = P()
    p.announce(ONE)
    p.announce(TWO)
    assert p.hears(ONE, (7, 8, 9)) == [Accepted(ONE, 0)]
    return p


@pytest.mark.parametrize("stage", ["waits", "streams", "writes"])
def test_a_block_of_a_live_transfer_is_refused(p, stage):
    """Whether its WRITEs are to come or on their way; nothing is posted for the second one, ever."""
    if stage != "waits":
        p.handle(ONE, PrefillAdvanced(0, (1,), False))
    if stage == "writes":
        p.handle(ONE, PrefillFinished((1, 2, 3)))
    assert p.is_refused(TWO, (4, 9, 5), 9)
    p.handle(TWO, PrefillFinished((4, 5, 6)))
    assert not [each for each in p.writes if each.key == TWO]


def test_a_refused_registration_is_refused_when_it_comes_again(p):
    """The decode worker has been told that it failed, and given the other blocks away."""
    assert p.is_refused(TWO, (4, 9, 5), 9)
    p.handle(ONE, PrefillFinished((1, 2, 3)))
    p.handle(ONE, WritesDone(3, 3))
    (answer,) = p.hears(TWO, (4, 9, 5))
    assert answer.reason is Reason.UNKNOWN_TRANSFER


@pytest.mark.parametrize("peer", [CONSUMER, name(1)])
def test_blocks_of_others_are_other_blocks(p, peer):
    """The same number is another block at another decode worker; and at the same one, other numbers are."""
    blocks = (7, 8, 9) if peer != CONSUMER else (10, 11, 12)
    assert p.hears(TWO, blocks, peer=peer)[0] == Accepted(TWO, 0)


@pytest.mark.parametrize(
    "events",
    [
        [PrefillFinished((1, 2, 3)), WritesDone(3, 3)],
        [PrefillFinished((1, 2, 3)), WritesFailed("link down")],
        [PrefillAborted()],
        [CancelReceived(CONSUMER, 0, Reason.CONSUMER_GONE)],
        [PrefillAdvanced(0, (1,), False), CancelReceived(CONSUMER, 0, Reason.CONSUMER_GONE), WritesDone(1, 1)],
    ],
    ids=["completed", "failed", "aborted", "cancelled", "drained"],
)
def test_a_block_is_free_when_nothing_can_reach_it_any_more(p, events):
    """With the word that tells the decode worker so."""
    for event in events:
        assert p.is_refused(TWO, (7, 8, 9), 7, attempt=events.index(event))
        p.handle(ONE, event)
    assert p.hears(TWO, (7, 8, 9), attempt=9)[0] == Accepted(TWO, 9)


def test_a_block_is_kept_from_others_while_the_last_bytes_fly(p):
    """A consumer that is lost, and comes back under the same name: what is in flight to it may still land."""
    p.handle(ONE, PrefillAdvanced(0, (1,), False))
    p.machine.lose_peer(CONSUMER, "silent", p.now)
    assert p.is_refused(TWO, (7, 8, 9), 7)
    p.handle(ONE, WritesFailed("disconnected"))
    assert p.hears(TWO, (7, 8, 9), attempt=1)[0] == Accepted(TWO, 1)


def test_a_newer_attempt_may_have_the_blocks_of_the_older_one(p):
    """Nothing of the older one is in flight when the newer one's turn comes; both stay closed to others."""
    p.handle(ONE, PrefillAdvanced(0, (1,), False))
    assert p.hears(ONE, (9, 10, 11), attempt=1)[0] == Accepted(ONE, 1)
    for number, block in enumerate((7, 9, 11)):
        assert p.is_refused(TWO, (20, block, 21), block, attempt=number)
    p.handle(ONE, WritesDone(1, 1))
    assert p.is_refused(TWO, (20, 9, 21), 9, attempt=3)
    assert p.hears(TWO, (20, 7, 21), attempt=4)[0] == Accepted(TWO, 4)


def test_what_names_no_blocks_stands_in_nobody_s_way(p):
    """A consumer that READs, one that has everything, and one that lacks the tail only."""
    assert p.hears(TWO, (), mode=PULL)[0] == Accepted(TWO, 0)
    p.handle(TWO, CancelReceived(CONSUMER, 0, Reason.CONSUMER_GONE))
    assert p.hears(TWO, (10,), attempt=1, first_token=32)[0] == Accepted(TWO, 1)
    three = TransferKey("three")
    p.handle(three, announced("three", num_tokens=48))
    for moment in range(2):  # none at all is over at once, and may be asked for while others write
        answers = p.hears(three, (), first_token=48, num_tokens=48)
        assert [each.end for each in answers if isinstance(each, Ended)] == [End.COMPLETED], moment


def test_claims_leave_nothing_behind():
    """Neither peers nor transfers."""
    claims = Claims()
    claims.set(ONE, [(CONSUMER, (1, 2)), (name(1), (1,)), (CONSUMER, (2, 3))])
    assert claims.foreign(TWO, CONSUMER, (5, 3)) == 3
    assert claims.foreign(ONE, CONSUMER, (5, 3)) is None
    claims.set(ONE, [(CONSUMER, (2, 3))])
    assert claims.foreign(TWO, CONSUMER, (1,)) is None
    assert claims.foreign(TWO, CONSUMER, (2,)) == 2
    claims.set(ONE, [])
    assert (claims._of_peer, claims._of_transfer) == ({}, {})
