"""Steps on the emulated device's stream, with a clock that the test turns; `Device` with a real thread."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.emulator.stream import Device, Stream

MARGIN = 200e-6
"""Work is begun this much earlier than its cost asks for, and this much is not counted as late."""
STEP = 0.010


class Clock:
    """Time passes when somebody sleeps or works. Sleeps may end late."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.overslept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.overslept


class Rig:
    """A stream; each step notes when its work was done."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.stream: Stream[str] = Stream(self.clock, self.clock.sleep)
        self.began = self.clock.now
        self.worked: list[tuple[str, float]] = []

    def launch(self, name: str, duration: float = STEP, cost: float = 0.0, takes: float = 0.0):
        """A step whose work is expected to take `cost` and takes `takes`."""

        def work() -> str:
            self.worked.append((name, self.clock.now - self.began))
            self.clock.now += takes
            return f"result of {name}"

        return self.stream.launch(duration, work, cost)

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.stream.run_next()

    @property
    def elapsed(self) -> float:
        return self.clock.now - self.began


def about(seconds: float):
    """To a microsecond; the clock's own numbers are large."""
    return pytest.approx(seconds, abs=1e-6)


# When steps run.


def test_a_step_takes_its_time():
    """Its result is there when it has passed."""
    rig = Rig()
    step = rig.launch("a")
    rig.run()
    assert rig.elapsed == about(STEP)
    assert step.result() == "result of a"


def test_steps_run_one_after_another():
    """A step that is launched after the one before has ended begins at once."""
    rig = Rig()
    rig.launch("a")
    rig.run()
    rig.clock.now += 0.003
    second = rig.launch("b")
    rig.run()
    assert (second.begin - rig.began, second.end - rig.began) == (about(0.013), about(0.023))
    assert rig.elapsed == about(0.023)


def test_a_step_launched_ahead_begins_where_the_one_before_ends():
    """The host may be ahead; the device has no gap then."""
    rig = Rig()
    rig.launch("a")
    rig.clock.now += 0.004
    second = rig.launch("b", 0.005)
    assert (second.begin - rig.began, second.end - rig.began) == (about(0.010), about(0.015))
    rig.run(2)
    assert rig.elapsed == about(0.015)


@given(st.lists(st.floats(0.0, 0.05), min_size=1, max_size=10))
def test_steps_launched_at_once_take_the_sum(durations):
    """Whatever their number."""
    rig = Rig()
    for duration in durations:
        rig.launch("step", duration)
    rig.run(len(durations))
    assert rig.elapsed == about(sum(durations))
    assert rig.stream.busy_seconds == pytest.approx(sum(durations))


@given(st.lists(st.tuples(st.floats(0.0, 0.02), st.floats(0.0, 0.02)), min_size=1, max_size=12))
def test_steps_never_overlap(launches):
    """Each begins at the end of the one before or at its launch, whichever is later."""
    rig, free_at = Rig(), 0.0
    for wait, duration in launches:
        rig.clock.now += wait
        launched_at = rig.clock.now
        step = rig.launch("step", duration)
        assert step.begin == max(free_at, launched_at)
        assert step.end == step.begin + duration
        free_at = step.end


def test_a_late_host_does_not_shift_the_device_s_pace():
    """The device's thread is held up within the first step; the second one ends when it would have ended anyway."""
    rig = Rig()
    rig.launch("a")
    rig.launch("b")
    rig.clock.now += 0.012
    rig.run(2)
    assert rig.elapsed == about(0.020)


# When work is done.


@pytest.mark.parametrize(
    ("duration", "cost", "begins_at"),
    [(0.010, 0.0, 0.0098), (0.010, 0.004, 0.0058), (0.010, 0.0098, 0.0), (0.010, 0.5, 0.0), (0.0, 0.0, 0.0)],
)
def test_work_is_done_as_late_as_possible(duration, cost, begins_at):
    """Its cost and a margin before the step ends; at once, where it would not be done in time otherwise."""
    rig = Rig()
    rig.launch("a", duration, cost)
    rig.run()
    assert rig.worked == [("a", about(begins_at))]
    assert rig.elapsed == about(duration)


@given(st.lists(st.tuples(st.floats(0.001, 0.02), st.floats(0.0, 1.0)), min_size=1, max_size=8))
def test_work_is_within_its_step(steps):
    """No step's words are written before it begins on the device, if their cost fits, nor after it has ended."""
    rig = Rig()
    costs = [max(0.0, share * duration - MARGIN) for duration, share in steps]
    launched = [rig.launch("step", duration, cost) for (duration, _), cost in zip(steps, costs, strict=True)]
    rig.run(len(steps))
    for (_, moment), step, cost in zip(rig.worked, launched, costs, strict=True):
        begin, end = step.begin - rig.began, step.end - rig.began
        assert begin - 1e-6 <= moment <= end + 1e-6
        assert moment >= end - cost - MARGIN - 1e-6


def test_work_is_done_in_the_order_of_launches():
    """Each once."""
    rig = Rig()
    steps = [rig.launch(name) for name in "abc"]
    rig.run(3)
    assert [name for name, _ in rig.worked] == ["a", "b", "c"]
    assert [step.result() for step in reversed(steps)] == ["result of c", "result of b", "result of a"]
    assert len(rig.worked) == 3


def test_an_error_is_raised_where_the_result_is_wanted():
    """And the device goes on."""
    rig = Rig()

    def fail() -> str:
        raise LookupError("no such block")

    failed, after = rig.stream.launch(STEP, fail), rig.launch("after")
    rig.run(2)
    with pytest.raises(LookupError, match="no such block"):
        failed.result()
    assert failed.event().query()
    assert after.result() == "result of after"


# Figures.


def test_work_that_takes_longer_than_its_step_is_late():
    """By what is more than the margin; the next step is not shifted by it."""
    rig = Rig()
    rig.launch("slow", STEP, cost=STEP, takes=0.015)
    second = rig.launch("b")
    rig.run()
    assert rig.elapsed == about(0.015)
    assert rig.stream.late_seconds == about(0.005 - MARGIN)
    rig.run()
    assert second.end - rig.began == about(0.020)
    assert rig.elapsed == about(0.020)
    assert rig.stream.late_seconds == about(0.005 - MARGIN)


@pytest.mark.parametrize(
    ("overslept", "late"), [(0.0, 0.0), (0.0001, 0.0), (0.0003, 0.0), (0.0005, 0.0001), (0.0104, 0.0100)]
)
def test_sleeps_that_end_late_count_from_the_margin_on(overslept, late):
    """A processor that was not free: work is begun a margin early, and a result may be a margin late."""
    rig = Rig()
    rig.clock.overslept = overslept
    rig.launch("a")
    rig.run()
    assert rig.stream.late_seconds == about(late)


def test_busy_time_is_the_device_s():
    """Idle time between steps does not count, nor how long the work took here."""
    rig = Rig()
    rig.launch("a", 0.010, takes=0.1)
    rig.run()
    rig.clock.now += 5.0
    rig.launch("b", 0.030)
    rig.run()
    assert rig.stream.busy_seconds == pytest.approx(0.040)


# Events.


def test_an_event_of_an_empty_stream_is_done():
    """There is nothing to wait for."""
    rig = Rig()
    assert rig.stream.record().query()
    rig.launch("a")
    rig.run()
    assert rig.stream.record().query()


def test_an_event_is_behind_what_was_launched_before_it():
    """Not behind what is launched later."""
    rig = Rig()
    rig.launch("a")
    rig.launch("b")
    event = rig.stream.record()
    last = rig.launch("c").event()
    rig.run()
    assert not event.query()
    rig.run()
    assert event.query()
    assert not last.query()
    rig.run()
    assert last.query()


def test_an_event_is_not_done_while_the_step_runs():
    """Nor may one that is recorded then be taken for done."""
    rig, seen = Rig(), []
    step = rig.stream.launch(STEP, lambda: seen.append((step.event().query(), rig.stream.record().query())) or "")
    rig.run()
    assert seen == [(False, False)]
    assert step.event().query()


def test_others_wait_for_an_event():
    """`synchronize` returns when the step is done, in any thread, and with what the step has written in place."""
    rig, seen = Rig(), []
    event = rig.launch("a").event()
    waiter = threading.Thread(target=lambda: (event.synchronize(), seen.append(list(rig.worked))))
    waiter.start()
    rig.run()
    waiter.join(10)
    assert not waiter.is_alive()
    assert seen == [rig.worked]


# The end, and the device's thread.


def test_a_closed_stream_runs_what_is_left():
    """And says then that there is no more."""
    rig = Rig()
    step = rig.launch("a")
    rig.stream.close()
    assert rig.stream.run_next()
    assert not rig.stream.run_next()
    assert step.result() == "result of a"


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvb-emu-device"]


def test_the_device_runs_steps_by_itself():
    """Nobody has to wait for a step for it to be done; `stop` runs the rest and ends the thread."""
    stream: Stream[int] = Stream()
    device, ran_in = Device(stream), []
    device.start()
    steps = [stream.launch(0.001, lambda: ran_in.append(threading.current_thread().name) or 7) for _ in range(5)]
    assert steps[2].result() == 7
    device.stop()
    assert [step.event().query() for step in steps] == [True] * 5
    assert ran_in == ["kvb-emu-device"] * 5
    assert device_threads() == []


def test_a_device_that_waits_can_be_stopped():
    """It has no step to do."""
    device: Device[int] = Device(Stream())
    device.start()
    device.stop()
    assert device_threads() == []


def test_a_held_up_host_does_not_hold_up_the_device():
    """While this thread does something else, both steps are done, each in its time."""
    stream: Stream[float] = Stream()
    device = Device(stream)
    device.start()
    began = time.monotonic()
    steps = [stream.launch(0.02, time.monotonic) for _ in range(2)]
    held_up = sum(number * number for number in range(300_000))
    assert held_up > 0
    ends = [step.result() - began for step in steps]
    device.stop()
    assert 0.015 < ends[0] < ends[1]
    assert ends[1] > 0.035
