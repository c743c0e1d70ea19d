"""Blocks of sequences that have left: spoiled once, and at no wrong moment."""

import numpy as np

from kvberth.emulator.contexts import Arrival, Continuation, StepPlan
from kvberth.emulator.scrub import Scrubber
from kvberth.emulator.stream import Event, Stream


class Rig:
    """A scrubber, and a stream whose steps are run one by one."""

    def __init__(self) -> None:
        self.spoiled: list[list[int]] = []
        self.scrubber = Scrubber(lambda blocks: self.spoiled.append(blocks.tolist()))
        clock = [0.0]
        self._stream: Stream[None] = Stream(lambda: clock[0], lambda seconds: None)

    def launch(self, *, arrivals=(), continuations=(), finished=(), preempted=()) -> Event:
        """A step as the worker launches it; it stays in flight until `run`."""
        plan = StepPlan(tuple(finished), tuple(preempted), tuple(arrivals), tuple(continuations))
        self.scrubber.before_step(plan)
        event = self._stream.launch(0.0, lambda: None).event()
        self.scrubber.after_launch(plan, event)
        return event

    def run(self) -> None:
        self._stream.run_next()

    def step(self, **plan) -> None:
        self.launch(**plan)
        self.run()


def arrival(name: str, *blocks: int) -> Arrival:
    return Arrival(name, np.zeros(20, dtype=np.uint32), np.array(blocks, dtype=np.int64), 19, 1)


def continuation(name: str, *blocks: int, resumed: bool = False) -> Continuation:
    new = np.array(blocks, dtype=np.int64) if blocks else None
    return Continuation(name, new, resumed, 20, 1, 1, None)


def test_all_blocks_of_a_sequence_are_spoiled_when_it_has_left():
    """Those of its prompt and those that it was given while it decoded; once."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 5, 3)])
    rig.step(continuations=[continuation("a")])
    rig.step(continuations=[continuation("a", 9)])
    assert rig.spoiled == []
    rig.step(finished=["a"])
    assert rig.spoiled == [[5, 3, 9]]
    rig.step()
    assert rig.spoiled == [[5, 3, 9]]


def test_others_keep_theirs():
    """Only who has left is spoiled."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1), arrival("b", 2), arrival("c", 3)])
    rig.step(continuations=[continuation("b")], finished=["a", "c"])
    assert rig.spoiled == [[1], [3]]


def test_blocks_are_spoiled_before_the_step_that_may_use_them():
    """The step which says that a sequence has left may give its blocks to another one."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1)])
    rig.launch(arrivals=[arrival("b", 1)], finished=["a"])
    assert rig.spoiled == [[1]]
    rig.run()
    rig.step(finished=["b"])
    assert rig.spoiled == [[1], [1]]


def test_a_sequence_in_flight_is_spoiled_behind_its_last_step():
    """An aborted sequence is in one more step, which still writes its blocks."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1)])
    rig.launch(continuations=[continuation("a", 2)])
    rig.launch(finished=["a"])
    assert rig.spoiled == []
    rig.run()
    rig.launch()
    assert rig.spoiled == [[1, 2]]
    rig.run()
    rig.step()
    assert rig.spoiled == [[1, 2]]


def test_who_waits_does_not_hold_up_others():
    """Of two that leave together, one is in flight."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1), arrival("b", 2)])
    rig.launch(continuations=[continuation("a")])
    rig.launch(finished=["a", "b"])
    assert rig.spoiled == [[2]]
    rig.run()
    rig.launch()
    assert rig.spoiled == [[2], [1]]


def test_a_sequence_that_came_back_has_its_new_blocks():
    """Those that it had before a preemption are others' by now."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1, 2)])
    rig.step(arrivals=[arrival("b", 1)], preempted=["a"])
    rig.step(continuations=[continuation("a", 7, 8, resumed=True), continuation("b")])
    rig.step(continuations=[continuation("a", 9)])
    rig.step(finished=["a"])
    assert rig.spoiled == [[7, 8, 9]]


def test_a_preempted_sequence_that_ends_has_no_blocks():
    """vLLM has given them to another one, whose words must stay."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1, 2)])
    rig.step(arrivals=[arrival("b", 1, 2)], preempted=["a"])
    rig.step(continuations=[continuation("b")], finished=["a"])
    assert rig.spoiled == []


def test_a_name_can_be_used_again():
    """The blocks of the one that has left are spoiled, and the new one's are not."""
    rig = Rig()
    rig.step(arrivals=[arrival("a", 1)])
    rig.step(arrivals=[arrival("a", 2)], finished=["a"])
    assert rig.spoiled == [[1]]
    rig.step(finished=["a"])
    assert rig.spoiled == [[1], [2]]


def test_who_never_ran_is_no_error():
    """It has no blocks that are known here."""
    rig = Rig()
    rig.step(finished=["never"])
    assert rig.spoiled == []
