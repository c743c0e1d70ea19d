"""What the router's benchmark computes from its records, and that its client sees what is wrong with a stream."""

import json
import zlib

import pytest
from benchmarks.router_engines import DONE, event, text_of
from benchmarks.router_figures import added_rows, cost_rows, most_open, window_figures
from benchmarks.router_load import Record, StreamCheck


def record(arrivals_ms, *, sent_s=0.0, is_counted=True, error=None):
    return {
        "sent_s": sent_s,
        "arrivals_ms": arrivals_ms,
        "delays_ms": [0.5] * len(arrivals_ms),
        "is_counted": is_counted,
        "error": error,
    }


def window(target, case, repetition, ttft, *, requests=0, tokens=0, cpu_seconds=0.0):
    times = {name: dict.fromkeys(("p50", "p95", "p99"), ttft) for name in ("ttft_ms", "itl_ms", "delay_ms")}
    about = {"target": target, "mode": "push", "case": case, "repetition": repetition, "failures": {}}
    spent = {
        "router_cpu_seconds": cpu_seconds,
        "idle_cpu_share": 0.01,
        "router_rss_bytes": 1,
        "others_cpu_seconds": 0.0,
    }
    return about | times | spent | {"requests": requests, "tokens": tokens, "wall_seconds": 10.0}


def test_only_whole_streams_behind_the_ramp_count():
    """What came in the ramp or broke is in the sums of requests and tokens, and not in the times."""
    figures = window_figures(
        [
            record([10.0, 12.0, 15.0]),
            record([1000.0, 2000.0], is_counted=False),
            record([5000.0], error="broken"),
        ]
    )
    assert (figures["requests"], figures["counted"], figures["tokens"]) == (3, 1, 6)
    assert figures["failures"] == {"broken": 1}
    assert figures["ttft_ms"]["p50"] == 10.0
    assert figures["itl_ms"]["p50"] == 2.5


def test_a_window_of_failures_has_no_times():
    """Rather than times of nothing."""
    figures = window_figures([record([], error="refused")])
    assert figures["failures"] == {"refused": 1}
    assert "ttft_ms" not in figures


def test_added_is_the_difference_in_the_same_repetition():
    """The machine may be slower in one repetition than in another: each is compared with its own."""
    windows = [window("direct", "200", n, ttft) for n, ttft in enumerate((75.0, 80.0, 90.0))]
    windows += [window("kvberth", "200", n, ttft) for n, ttft in enumerate((76.0, 80.5, 93.0))]
    windows.append(window("direct", "1", 0, 1000.0))
    rows = {(row["target"], row["case"]): row for row in added_rows(windows)}
    assert rows["kvberth", "200"]["ttft_ms_p50"] == (1.0, 0.5, 3.0)
    assert rows["direct", "200"]["ttft_ms_p50"] == (80.0, 75.0, 90.0)


def test_costs_are_told_apart_by_windows_of_different_mixes():
    """2 ms per request, 50 ms per 1,000 tokens, and 10 ms per second for being there."""
    mixes = {"200": (800, 51_200), "16, short answers": (2000, 2000)}
    windows = [window("direct", case, 0, 1.0) for case in mixes]
    for case, (requests, tokens) in mixes.items():
        cpu = 2e-3 * requests + 50e-6 * tokens + 0.1
        windows.append(window("kvberth", case, 0, 1.0, requests=requests, tokens=tokens, cpu_seconds=cpu))
    (row,) = cost_rows(windows)
    assert row["cpu_seconds_per_request"] == pytest.approx(2e-3)
    assert row["cpu_seconds_per_1000_tokens"] == pytest.approx(50e-3)


def test_open_streams_are_those_between_first_and_last_token():
    """One that begins when another ends is not open beside it."""
    records = [record([0.0, 100.0]), record([0.0, 50.0], sent_s=0.05), record([0.0, 50.0], sent_s=0.1), record([])]
    assert most_open(records) == 2


def checked(*chunks, tokens=2):
    answer = Record(0.0, tokens, True)
    check = StreamCheck(answer, 0.0)
    for chunk in chunks:
        check.feed(chunk, 0.25)
    check.finish()
    return answer


def stream(*numbers):
    tokens = [event(b"%d %d" % (number, 200_000_000)) for number in numbers]
    return [*tokens, event(b"crc %d" % zlib.crc32(b"".join(tokens)), is_last=True), DONE]


def test_a_whole_stream_is_timed_however_it_is_cut():
    """A token counts when its last byte is here."""
    whole = b"".join(stream(0, 1))
    for size in (1, 7, len(whole)):
        answer = checked(*(whole[begin : begin + size] for begin in range(0, len(whole), size)))
        assert answer.arrivals_ms == [250.0, 250.0]
        assert answer.delays_ms == [50.0, 50.0]


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        (stream(0, 1)[:-1], "without its end"),
        (stream(0, 1)[1:], "token 1 came as number 0"),
        ([*stream(0, 1)[:2], *stream(0)[-2:]], "not those that the engine sent"),
        ([stream(0, 1)[0].replace(b"model", b"modem"), *stream(0, 1)[1:]], "not those that the engine sent"),
        (stream(0), "1 tokens of 2"),
        ([*stream(0, 1)[:-1], event(b"0 0")], "in place of the end"),
    ],
)
def test_what_is_lost_or_changed_on_the_way_is_seen(chunks, said):
    """Missing, doubled or altered events, and a stream that is cut off."""
    with pytest.raises(ValueError, match=said):
        checked(*chunks)


def test_an_event_is_a_chunk_of_a_completion():
    """JSON as vLLM writes it, with the text that it was given."""
    one = event(b"3 14", is_last=True)
    assert text_of(one) == b"3 14"
    assert json.loads(one.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
