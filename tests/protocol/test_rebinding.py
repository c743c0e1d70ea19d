"""One producer, several consumers: a decode worker can be chosen again until the bytes have landed."""

import pytest
from tests.protocol.pair import Site, announced, name

from kvberth.protocol import (
    End,
    Reason,
    TransferMode,
)
from kvberth.protocol.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillFinished,
    ReadsDone,
    RequestAborted,
    WritesDone,
)

PUSH, PULL = TransferMode.PUSH, TransferMode.PULL


def streaming() -> Site:
    """One block of three is on its way to D0."""
    return Site().produce(announced()).bind().deliver().produce(PrefillAdvanced(0, (1,), False)).deliver()


def test_a_newer_attempt_takes_over_in_mid_stream():
    """The first one hears it when nothing of it is in flight; the second gets everything from the first block on."""
    site = streaming().bind().deliver()
    assert site.received() == []
    assert site.writes() == [(name(0), (1,))]
    site.produce(PrefillAdvanced(1, (2,), False)).produce(WritesDone(1, 1)).deliver()
    assert site.received() == [(0, False)]
    assert (0, End.SUPERSEDED, Reason.NEWER_ATTEMPT) in site.ends()
    assert site.writes()[1:] == [(name(1), (1, 2))]
    site.produce(PrefillAdvanced(2, (3,), True)).produce(WritesDone(3, 3)).deliver()
    assert site.received()[1:] == [(1, True)]
    site.produce(PrefillFinished((1, 2, 3)))
    assert site.released() == ["p-1"]
    assert [end for who, end, _ in site.ends() if who is None] == [End.COMPLETED]


def test_a_newer_attempt_takes_over_while_the_last_bytes_fly():
    """P's engine is done; P keeps the blocks until one attempt has completed."""
    site = streaming().produce(PrefillFinished((1, 2, 3))).bind().deliver().produce(WritesDone(3, 3)).deliver()
    assert site.received() == [(0, False)]
    assert site.released() == []
    site.produce(WritesDone(3, 3)).deliver()
    assert site.received() == [(0, False), (1, True)]
    assert site.released() == ["p-1"]


@pytest.mark.parametrize("mode", [PUSH, PULL])
def test_a_newer_attempt_takes_over_from_a_reader(mode):
    """It is asked to stop, and P waits until it has."""
    site = Site().produce(announced()).produce(PrefillFinished((1, 2, 3))).bind(PULL).deliver().bind(mode).deliver()
    assert site.received() == []
    assert site.writes() == []
    site.consume(0, ReadsDone(1, 1)).deliver()
    assert site.received() == [(0, False)]
    if mode is PUSH:
        site.produce(WritesDone(3, 3))
    else:
        site.consume(1, ReadsDone(3, 3))
    site.deliver()
    assert site.received() == [(0, False), (1, True)]
    assert site.released() == ["p-1"]


def test_the_newest_of_several_wins():
    """Whoever waited in between hears it at once."""
    site = streaming().bind().deliver().bind().deliver()
    assert site.received() == [(1, False)]
    site.produce(WritesDone(1, 1)).deliver()
    assert site.received() == [(1, False), (0, False)]
    assert site.writes()[-1] == (name(2), (1,))


def test_an_older_attempt_that_comes_late_is_superseded():
    """Messages overtake each other."""
    site = Site().produce(announced()).bind()
    late = site.to_producer.pop()
    site.bind().deliver().hear(*late).deliver()
    assert site.received() == [(0, False)]
    assert (0, End.SUPERSEDED, Reason.NEWER_ATTEMPT) in site.ends()


@pytest.mark.parametrize("how", ["abort", "death", "decline"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_another_decode_worker_can_come_after_the_first_is_gone(how, is_finished):
    """P keeps the blocks for a while, though nobody is registered."""
    site = Site().produce(announced())
    if how == "decline":
        site.decline().deliver()
    else:
        site.bind().deliver()
    if how == "abort":
        site.consume(0, RequestAborted()).deliver()
    elif how == "death":
        site.lose(0)
    if is_finished:
        site.produce(PrefillFinished((1, 2, 3)))
    site.pass_time(1.0).bind().deliver()
    if not is_finished:
        site.produce(PrefillFinished((1, 2, 3)))
    site.produce(WritesDone(3, 3)).deliver()
    assert site.received()[-1] == (1, True)
    assert site.released() == ["p-1"]


@pytest.mark.parametrize(("how", "end"), [("abort", End.CANCELLED), ("death", End.FAILED), ("decline", End.CANCELLED)])
def test_if_nobody_comes_the_blocks_are_free_soon(how, end):
    """And the transfer ends as its last attempt did."""
    site = Site().produce(announced())
    if how == "decline":
        site.decline().deliver()
    else:
        site.bind().deliver()
    if how == "abort":
        site.consume(0, RequestAborted()).deliver()
    elif how == "death":
        site.lose(0)
    site.pass_time(60.0).produce(PrefillFinished((1, 2, 3)))
    assert site.released() == []
    site.pass_time(site.timing.rebind_seconds)
    assert site.released() == ["p-1"]
    assert [each for who, each, _ in site.ends() if who is None] == [end]


def test_given_up_before_the_producer_has_the_request():
    """It comes, and is not held for the whole lease."""
    site = Site().decline().deliver().produce(announced()).produce(PrefillFinished((1, 2, 3)))
    site.pass_time(site.timing.rebind_seconds)
    assert site.released() == ["p-1"]


def test_a_registration_that_was_cancelled_is_never_written_to():
    """Its `Register` comes again behind its `Cancel`; D has given the blocks to others."""
    site = Site().produce(announced()).bind()
    late = site.to_producer[-1]
    site.deliver().consume(0, RequestAborted()).deliver()
    assert site.received() == [(0, False)]
    site.hear(*late).produce(PrefillFinished((1, 2, 3))).deliver()
    assert site.writes() == []


def test_a_refused_newcomer_leaves_the_older_attempt_alone():
    """Its registration is for another prompt."""
    site = streaming()
    site.bind(digest=b"another").deliver()
    assert site.received() == [(1, False)]
    site.produce(PrefillFinished((1, 2, 3))).produce(WritesDone(3, 3)).deliver()
    assert site.received() == [(1, False), (0, True)]


def test_aborted_while_one_waits_to_take_over():
    """Both hear it: there will be no KV."""
    site = streaming().bind().deliver().produce(PrefillAborted()).produce(WritesDone(1, 1)).deliver()
    assert sorted(site.received()) == [(0, False), (1, False)]
    assert site.released() == ["p-1"]
