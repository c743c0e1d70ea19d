"""What is left behind is found."""

from dataclasses import replace

from prometheus_client.samples import Sample

from kvberth.drills.states import (
    STATE_METRICS,
    EngineState,
    ProcessState,
    engine_state,
    failed_handoffs,
    growth,
    held_blocks,
    leftovers,
    new_corruptions,
)
from kvberth.launch.metrics import MetricsPage
from kvberth.protocol import End, Reason

FREE = EngineState(held_blocks=0, leased_blocks=0, requests=0, corruptions=0, failed_handoffs=0)
PROCESS = ProcessState(pid=7, threads=60, files=130, rss_bytes=1 << 30)


def test_nothing_is_left():
    """Of two engines without work."""
    assert leftovers({"p": FREE, "d": FREE}) == []
    assert held_blocks({"p": FREE, "d": FREE}) == 0


def test_each_thing_that_is_left_is_named():
    """Blocks, leases and requests, by engine."""
    states = {"p": replace(FREE, held_blocks=5, leased_blocks=5), "d": replace(FREE, requests=1)}
    assert leftovers(states) == [
        "p holds 5 blocks (5 leased) and 0 requests",
        "d holds 0 blocks (0 leased) and 1 requests",
    ]
    assert held_blocks(states) == 5


def test_corruptions_are_counted_over_a_restart():
    """The counter of an engine that was started anew begins at 0."""
    before = {"p": replace(FREE, corruptions=3), "d": replace(FREE, corruptions=3)}
    after = {"p": replace(FREE, corruptions=4), "d": replace(FREE, corruptions=2)}
    assert new_corruptions(before, after) == 3
    assert new_corruptions(before, before) == 0


def test_handoffs_that_fail_when_all_is_well_are_named():
    """By engine, and over a restart; those that failed before do not count."""
    healed = {"p": FREE, "d": replace(FREE, failed_handoffs=7)}
    assert failed_handoffs(healed, healed) == []
    after = {"p": FREE, "d": replace(FREE, failed_handoffs=9)}
    assert failed_handoffs(healed, after) == ["2 handoffs to d failed although all was well again"]
    again = {"d": replace(FREE, failed_handoffs=1)}
    assert failed_handoffs(healed, again) == ["1 handoffs to d failed although all was well again"]


def test_an_engine_is_read_from_its_metrics():
    """Where a client has left or the router chosen anew, no handoff has failed for the engines' sake."""
    usage, leased, running, waiting, corruptions, transfers = STATE_METRICS

    def ended(role: str, end: End, reason: Reason, count: int) -> Sample:
        return Sample(transfers, {"role": role, "end": end, "reason": reason, "mode": "push"}, count)

    page = MetricsPage(
        [
            Sample(usage, {}, 0.25),
            Sample(leased, {}, 3),
            Sample(running, {}, 2),
            Sample(waiting, {}, 4),
            Sample(corruptions, {}, 1),
            ended("consumer", End.COMPLETED, Reason.NONE, 100),
            ended("consumer", End.CANCELLED, Reason.CONSUMER_GONE, 20),
            ended("consumer", End.FAILED, Reason.PEER_LOST, 5),
            ended("consumer", End.FAILED, Reason.TRANSPORT, 2),
            ended("consumer", End.FAILED, Reason.PREFILL_ABORTED, 11),
            ended("consumer", End.FAILED, Reason.NEWER_ATTEMPT, 31),
            ended("consumer", End.FAILED, Reason.HANDED_OVER, 17),
            ended("producer", End.FAILED, Reason.TRANSPORT, 13),
        ]
    )
    assert engine_state(page, 64) == EngineState(
        held_blocks=16, leased_blocks=3, requests=6, corruptions=1, failed_handoffs=7
    )


def test_threads_and_files_that_do_not_go_are_found():
    """Beyond what pools and idle connections take."""
    more = replace(PROCESS, threads=80, files=200)
    assert growth({"p": PROCESS}, {"p": replace(PROCESS, threads=62, files=140)}) == []
    assert growth({"p": PROCESS}, {"p": more}) == [
        "p had 60 threads before, and has 80",
        "p had 130 open files before, and has 200",
    ]


def test_a_process_that_was_started_anew_is_not_compared():
    """Nor one that was not there before."""
    more = replace(PROCESS, pid=8, threads=80)
    assert growth({"p": PROCESS}, {"p": more, "d": more}) == []
