"""Figures of a request, from its timeline. Times are binary fractions, so that differences are exact."""

import pytest

from kvberth.router import figures
from kvberth.router.timeline import CLIENT_STALLED, CLIENT_WENT_AWAY, What

from .timelines import a_push, bound, failed, noted, retried, timeline, to_decode, to_prefill

ALL = (
    *(figures.time_to_first_token, figures.time_per_output_token, figures.end_to_end, figures.queue),
    *(figures.bind, figures.prefill, figures.transfer),
)


def seconds(each):
    return {figure.__name__: figure(each) for figure in ALL}


def test_a_push_of_which_all_is_known():
    """Each figure is the time between two events; a token takes what is behind the first, through one less."""
    assert seconds(a_push()) == {
        "time_to_first_token": 2.0,
        "time_per_output_token": (3.0 - 2.0) / 4,
        "end_to_end": 3.0,
        "queue": 0.5,
        "bind": 0.5,
        "prefill": 1.0,
        "transfer": 0.125,
    }


def test_engines_that_say_nothing():
    """The queue is the router's part of it then, and the prefill the whole leg; what nobody knows is not made up."""
    each = timeline(
        to_prefill(0.25),
        bound(0.25, "late"),
        noted(1.0, What.PREFILL_DONE),
        to_decode(1.0),
        noted(1.5, What.FIRST_TOKEN),
        ends_at=2.0,
    )
    known = {name: value for name, value in seconds(each).items() if value is not None}
    assert known == {"time_to_first_token": 1.5, "end_to_end": 2.0, "queue": 0.25, "prefill": 0.75}


def test_an_answer_in_one_piece():
    """When its first token came nobody knows; it ends when it has been sent."""
    each = timeline(to_decode(0.25), ends_at=2.0, path="undivided")
    known = {name: value for name, value in seconds(each).items() if value is not None}
    assert known == {"end_to_end": 2.0, "queue": 0.25}


@pytest.mark.parametrize(
    "ended",
    [{"status": 499, "error": CLIENT_WENT_AWAY}, {"error": "decode_failed"}, {"status": 400}, {"status": 500}],
)
def test_what_was_not_answered_has_no_latency(ended):
    """Half an answer and an error would be the fastest of all."""
    each = timeline(
        to_decode(0.25), noted(0.5, What.FIRST_TOKEN), ends_at=2.0, output_tokens=3, last_token_at=1.5, **ended
    )
    assert (figures.end_to_end(each), figures.time_per_output_token(each)) == (None, None)


@pytest.mark.parametrize("tokens", [0, 1, None])
def test_a_single_token_has_no_time_per_token(tokens):
    """There is nothing behind the first; what `vllm bench serve` counts as 0 is left out."""
    each = timeline(noted(0.5, What.FIRST_TOKEN), ends_at=2.0, output_tokens=tokens, last_token_at=1.5)
    assert figures.time_per_output_token(each) is None


def test_the_transfer_that_counts_is_the_last():
    """What a failed try took is not the time of a prefill, but a wait."""
    each = timeline(
        to_prefill(0.0),
        noted(0.25, What.PREFILL_BEGAN),
        noted(0.5, What.PREFILL_DONE),
        to_decode(0.5),
        noted(0.75, What.REGISTERED),
        failed(1.0, "decode"),
        to_prefill(1.0),
        noted(1.5, What.PREFILL_BEGAN),
        to_decode(1.5),
        noted(1.75, What.REGISTERED),
        noted(3.5, What.PREFILL_DONE),
        noted(3.5, What.TRANSFERRED),
        ends_at=4.0,
    )
    assert (figures.prefill(each), figures.bind(each), figures.transfer(each)) == (2.0, 0.25, 0.0)


def test_a_stream_that_goes_on_elsewhere_was_waited_for_once():
    """The second transfer is no part of the time to the first token."""
    each = timeline(
        to_prefill(0.0),
        noted(0.5, What.PREFILL_DONE),
        noted(0.75, What.TRANSFERRED),
        noted(1.0, What.FIRST_TOKEN),
        noted(2.0, What.CONTINUED, tokens=3),
        to_prefill(2.0),
        noted(4.0, What.PREFILL_DONE),
        noted(5.0, What.TRANSFERRED),
        noted(5.0, What.FIRST_TOKEN),
        ends_at=6.0,
    )
    assert (figures.time_to_first_token(each), figures.prefill(each), figures.transfer(each)) == (1.0, 0.5, 0.25)


def test_the_bound_decode_worker_is_the_last():
    """One that was behind, and was taken back, has not registered."""
    each = timeline(to_prefill(0.0), to_decode(0.0), to_decode(1.0), noted(1.25, What.REGISTERED), ends_at=2.0)
    assert figures.bind(each) == 0.25


@pytest.mark.parametrize(
    ("happened", "phase"),
    [
        ([], "queue"),
        ([to_prefill(0.0)], "prefill"),
        ([to_prefill(0.0), noted(0.5, What.PREFILL_DONE)], "transfer"),
        ([to_prefill(0.0), noted(0.5, What.PREFILL_DONE), to_decode(0.5), noted(0.75, What.FIRST_TOKEN)], "decode"),
    ],
)
def test_where_it_ended(happened, phase):
    """The phase in which a client went away."""
    each = timeline(*happened, ends_at=1.0, status=499, error=CLIENT_WENT_AWAY)
    assert figures.last_phase(each) == phase


def test_retries_are_those_that_were_hidden():
    """A failure that is the client's answer in the end is none."""
    each = timeline(
        failed(0.1, "prefill"),
        retried(0.1, "prefill"),
        retried(0.2, "decode", "behind"),
        failed(0.3, "decode"),
        ends_at=1,
    )
    assert figures.retries(each) == [("prefill", "unreachable"), ("decode", "behind")]


@pytest.mark.parametrize(
    ("error", "has_begun", "is_broken"),
    [
        ("decode_failed", True, True),
        ("decode_timeout", True, True),
        ("decode_failed", False, False),
        (CLIENT_WENT_AWAY, True, False),
        (CLIENT_STALLED, True, False),
        (None, True, False),
    ],
)
def test_a_broken_stream_has_begun_and_ends_with_an_error(error, has_begun, is_broken):
    """Neither an error before its first byte nor a client that goes breaks one."""
    begun = [noted(0.5, What.FIRST_TOKEN)] if has_begun else []
    assert figures.is_broken(timeline(*begun, ends_at=1, error=error)) is is_broken


def test_why_it_was_not_split():
    """The last reason; a request that was split after all has none."""
    left = [
        noted(0.1, What.LEFT_UNDIVIDED, reason="little_missing"),
        noted(0.2, What.LEFT_UNDIVIDED, reason="prefill_failed"),
    ]
    assert figures.undivided_reason(timeline(*left, ends_at=1, path="undivided")) == "prefill_failed"
    assert figures.undivided_reason(timeline(*left, ends_at=1, path="push")) is None


def test_the_binding_of_what_was_split():
    """The last one; without two legs there is none."""
    assert timeline(bound(0.1, "jit"), bound(0.2, "late"), ends_at=1).binding == "late"
    assert timeline(bound(0.1, "jit"), ends_at=1, path="undivided").binding == "none"
    assert timeline(ends_at=1, path="pull").binding == "none"
