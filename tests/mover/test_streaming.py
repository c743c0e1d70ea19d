"""KV that moves while the prompt is read: two cores, real bytes, and fences that the test opens."""

import pytest
from tests.mover.rig import KEY, Rig

from kvberth.mover import AdvancePrefill, EndPrefill, FinishPrefill, RestartPrefill
from kvberth.mover.fences import FencedCommands
from kvberth.protocol import TransferKey, TransferMode
from kvberth.protocol.events import PrefillAborted, PrefillAdvanced, PrefillFinished, PrefillRestarted


class Gate:
    """A fence."""

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open

    def query(self) -> bool:
        return self.is_open


def advance(rig: Rig, first: int, *blocks: int, is_complete: bool = False, fence: Gate | None = None) -> None:
    """P's engine has launched a step: what it will write is there already, to be seen if it is read too early."""
    event = PrefillAdvanced(first, blocks, is_complete)
    rig.producer.core.command(AdvancePrefill((KEY,), event, fence), rig.now)


def compute(rig: Rig, place: int, block: int) -> None:
    """The forward pass writes the prompt's block number `place`."""
    rig.producer.memory[:, block] = 50 + place


def begin() -> Rig:
    rig = Rig()
    rig.announce()
    rig.wait(TransferMode.PUSH)
    rig.settle()
    return rig


def test_bytes_are_there_before_the_prompt_is_computed():
    """The first block has arrived while the others are not yet known."""
    rig = begin()
    compute(rig, 0, 1)
    advance(rig, 0, 1)
    rig.settle()
    assert (rig.consumer.memory[:, 7] == 50).all()
    assert rig.received() == []
    compute(rig, 1, 2)
    compute(rig, 2, 3)
    advance(rig, 1, 2, 3, is_complete=True)
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()
    assert rig.released() == set()
    rig.finish()
    rig.settle()
    assert rig.released() == {"p-1"}
    (report,) = rig.results["D"].reports
    assert (report.record.num_bytes, report.record.num_descriptors) == (2 * 3 * 64, 4)


def test_nothing_is_read_before_its_fence_is_passed():
    """The host has launched the step long before the device has done it."""
    rig = begin()
    fence = Gate()
    advance(rig, 0, 1, 2, 3, is_complete=True, fence=fence)
    rig.finish()  # its bytes are written here, behind a fence that is still shut
    rig.producer.memory[:, [1, 2, 3]] = 99
    rig.settle()
    assert (rig.consumer.memory == 2).all()
    assert rig.producer.core.next_wakeup(rig.now) == pytest.approx(0.001)
    for place, block in enumerate((1, 2, 3)):
        compute(rig, place, block)
    fence.is_open = True
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()
    assert rig.released() == {"p-1"}


def test_waiting_for_the_next_chunk_drives_nothing_on_the_producer():
    """Between two chunks nothing is in flight, and P's mover may sleep."""
    rig = begin()
    advance(rig, 0, 1)
    rig.settle()
    assert not rig.producer.core.is_moving()
    assert rig.consumer.core.is_moving()


def test_preempted_prefill_is_sent_again():
    """From other blocks, and only when the first WRITEs have landed."""
    rig = begin()
    rig.fabric.polls_until_done = 20
    compute(rig, 0, 1)
    advance(rig, 0, 1)
    rig.settle(5)
    rig.producer.core.command(RestartPrefill((KEY,), PrefillRestarted()), rig.now)
    rig.producer.memory[:, 1] = 99  # somebody else's now
    for place, block in enumerate((4, 5, 6)):
        compute(rig, place, block)
    advance(rig, 0, 4, 5, 6, is_complete=True)
    rig.settle(5)
    assert rig.received() == []
    rig.settle(60)
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()


def test_a_chunk_that_cannot_be_planned_ends_the_transfer_once():
    """A block named twice: D computes for itself, and P goes on."""
    rig = begin()
    advance(rig, 0, 1, 1)
    rig.settle()
    ((request, is_ok, _),) = rig.received()
    assert (request, is_ok) == ("d-1", False)
    advance(rig, 2, 3, is_complete=True)
    rig.finish()
    rig.pass_time(2.5)
    assert rig.released() == {"p-1"}


A, B = (TransferKey("a"),), (TransferKey("b"),)
FINISHED, ABORTED = PrefillFinished((1,)), PrefillAborted()


def test_commands_of_one_request_keep_their_order():
    """What comes behind a shut fence waits, and nobody else does."""
    fenced, gate = FencedCommands(), Gate()
    first = AdvancePrefill(A, PrefillAdvanced(0, (1,), True), gate)
    assert fenced.hold(first)
    assert fenced.hold(FinishPrefill(A, FINISHED))
    assert not fenced.hold(EndPrefill(B, ABORTED))
    assert list(fenced.passed()) == []
    gate.is_open = True
    assert list(fenced.passed()) == [first, FinishPrefill(A, FINISHED)]
    assert not fenced
    assert not fenced.hold(FinishPrefill(A, FINISHED))


def test_a_second_fence_holds_up_what_is_behind_it():
    """Chunks pass one by one."""
    fenced, gates = FencedCommands(), [Gate(), Gate()]
    chunks = [AdvancePrefill(A, PrefillAdvanced(place, (place,), False), gate) for place, gate in enumerate(gates)]
    assert all(fenced.hold(chunk) for chunk in chunks)
    gates[1].is_open = True
    assert list(fenced.passed()) == []
    gates[0].is_open = True
    assert list(fenced.passed()) == chunks


def test_without_a_fence_nothing_waits():
    """A processor's forward pass returns when it is done."""
    fenced = FencedCommands()
    assert not fenced.hold(AdvancePrefill(A, PrefillAdvanced(0, (1,), False)))
    assert not fenced.hold(AdvancePrefill(A, PrefillAdvanced(1, (2,), True), Gate(is_open=True)))
    assert list(fenced.passed()) == []


def test_what_landed_after_its_blocks_were_taken_away_does_not_count():
    """The preemption was told before they were overwritten; the WRITE ended between two looks."""
    rig = begin()
    rig.fabric.polls_until_done = 1
    for place, block in enumerate((1, 2, 3)):
        compute(rig, place, block)
    advance(rig, 0, 1, 2, 3, is_complete=True)
    rig.producer.core.turn(rig.now)  # posted
    rig.producer.core.look(rig.now)  # in flight
    rig.producer.memory[:] = 99  # somebody else's, as the engine has said:
    rig.producer.core.look(rig.now)  # landed
    rig.producer.core.command(RestartPrefill((rig.key,), PrefillRestarted()), rig.now)
    rig.settle()
    assert rig.received() == []
    for place, block in enumerate((4, 5, 6)):
        compute(rig, place, block)
    advance(rig, 0, 4, 5, 6, is_complete=True)
    rig.settle()
    assert rig.received() == [("d-1", True, "none")]
    assert rig.has_bytes()
