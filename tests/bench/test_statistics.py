"""Figures of records that are known."""

import pytest

from kvberth.bench import Percentiles, summarise


def test_percentiles_of_known_values(record):
    """1 to 101 ms: the percentiles are what one would say."""
    summary = summarise([record(number, ttft_ms=float(number + 1)) for number in range(101)])
    assert summary.ttft_ms == Percentiles(mean=51.0, p50=51.0, p95=96.0, p99=100.0)


def test_order_does_not_matter(record):
    """Records are written as requests end."""
    records = [record(number, ttft_ms=10.0 * number, late_ms=float(number)) for number in range(5)]
    assert summarise(records) == summarise(records[::-1])


def test_throughput_is_that_of_successes(record):
    """From the first sending to the last token that counts."""
    records = [record(0, sent_s=0.5), record(1, sent_s=3.5, e2e_ms=1000.0), record(2, error="timeout: 120 s")]
    summary = summarise(records)
    assert (summary.requests, summary.succeeded, summary.failed) == (3, 2, 1)
    assert summary.duration_seconds == 4.0
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 6)
    assert (summary.requests_per_second, summary.output_tokens_per_second) == (0.5, 1.5)


def test_failures_count_by_kind_and_not_in_the_times(record):
    """A request that failed after its first token does not make the first token quicker."""
    failed = record(1, error="short answer: 1 of 3 tokens came", ttft_ms=1.0, itl_ms=[1.0])
    summary = summarise([record(0), failed, record(2, error="HTTP 500: a"), record(3, error="HTTP 500: b")])
    assert summary.failures == {"HTTP 500": 2, "short answer": 1}
    assert summary.ttft_ms == Percentiles(100.0, 100.0, 100.0, 100.0)
    assert summary.itl_ms == Percentiles(10.0, 10.0, 10.0, 10.0)


def test_itl_is_over_all_gaps_and_tpot_over_requests(record):
    """A long answer has many gaps, and one time per output token."""
    summary = summarise([record(0, tpot_ms=10.0, itl_ms=[10.0]), record(1, tpot_ms=20.0, itl_ms=[20.0] * 3)])
    assert (summary.itl_ms.mean, summary.tpot_ms.mean) == (17.5, 15.0)


def test_answers_of_one_token_have_no_tpot(record):
    """And there is nothing to divide by."""
    summary = summarise([record(0, output_tokens=1, tpot_ms=None, itl_ms=[])])
    assert (summary.tpot_ms, summary.itl_ms) == (None, None)
    assert summary.ttft_ms is not None


@pytest.mark.parametrize("errors", [0, 2])
def test_nothing_succeeded(record, errors):
    """Figures that there are not are None, not zero and not an error."""
    summary = summarise([record(number, error="no connection") for number in range(errors)])
    assert (summary.requests, summary.failed, summary.duration_seconds) == (errors, errors, 0.0)
    assert (summary.requests_per_second, summary.output_tokens_per_second, summary.ttft_ms) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("idle_share", "late_ms", "warnings"),
    [
        (0.2, 5.0, []),
        (None, 0.0, []),
        (0.194, 0.0, ["the machine had only 19% idle: the figures show this machine, not the servers"]),
        (0.9, 7.25, ["the generator could not keep up: the p99 of its lateness is 7.2 ms"]),
        (
            0.9,
            60.0,
            [
                "the generator has fallen behind: half the requests went out more than 60 ms late, so these are "
                "figures of another load than the planned one"
            ],
        ),
    ],
)
def test_doubtful_figures_are_called_so(record, idle_share, late_ms, warnings):
    """A busy machine, and a generator that is late."""
    assert summarise([record(0, late_ms=late_ms)], idle_share=idle_share).warnings == warnings


def test_a_generator_that_has_fallen_behind_has_not_kept_up(record):
    """A single stall is a warning; half of the requests late is another load."""
    assert summarise([record(0, late_ms=0.0), record(1, late_ms=2.0), record(2, late_ms=900.0)]).kept_up
    assert not summarise([record(0, late_ms=0.0), record(1, late_ms=51.0), record(2, late_ms=900.0)]).kept_up


def test_lateness_is_that_of_what_was_sent(record):
    """A turn that could not be sent was not sent in time."""
    unsent = record(1, request_id="", late_ms=0.0, error="not sent: the turn before it failed")
    assert summarise([record(0, late_ms=3.0), unsent]).late_ms.p50 == 3.0


def test_cancelled_requests_are_neither(record):
    """They count, and what came of their answers is in no figure."""
    cancelled = record(1, cancelled=True, ttft_ms=1.0, e2e_ms=None, tpot_ms=None, output_tokens=2)
    summary = summarise([record(0), cancelled, record(2, error="timeout: x")])
    assert (summary.requests, summary.succeeded, summary.failed, summary.cancelled) == (3, 1, 1, 1)
    assert (summary.output_tokens, summary.ttft_ms.mean) == (3, 100.0)
    assert summary.failures == {"timeout": 1}


def test_tokens_that_come_together_are_said(record):
    """Then a gap is not the time of one token; nothing is divided to make it look so."""
    assert summarise([record(0, chunks=3)]).warnings == []
    summary = summarise([record(0, output_tokens=6, chunks=3), record(1, output_tokens=3, chunks=3)])
    assert summary.tokens_per_chunk == 1.5
    assert summary.warnings == ["the server sends 1.50 tokens per chunk: ITL is the gap between chunks, not tokens"]
