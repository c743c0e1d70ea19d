"""What the bytes of a stream say, however they were cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.bench.stream import error_message, read_answer

from .fakes import DONE, event, token, usage

WHOLE = token("a") + token("") + token("ü") + usage(7, 3) + DONE


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_cuts_change_nothing_but_times(cuts):
    """Events may come in any pieces, several in one or one in several, cut inside of a character too."""
    edges = [0, *sorted(cuts), len(WHOLE)]
    pieces = [(number, WHOLE[edges[number] : edges[number + 1]]) for number in range(len(edges) - 1)]
    answer = read_answer(pieces)
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("aü", 7, 3)
    assert (answer.error, answer.is_done) == (None, True)
    assert len(answer.chunk_times_ns) == 3
    assert answer.chunk_times_ns == sorted(answer.chunk_times_ns)


def test_a_chunk_came_when_its_end_came():
    """Half an event is no token yet."""
    first, second = token("a"), token("b")
    answer = read_answer([(1, first[:9]), (2, first[9:] + second[:3]), (3, second[3:] + DONE)])
    assert answer.chunk_times_ns == [2, 3]


def test_pings_and_other_line_ends():
    """Comments are skipped, and lines may end as in HTTP."""
    answer = read_answer([(1, b": ping\r\n\r\n" + token("a").replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n")])
    assert (answer.text, answer.is_done) == ("a", True)


def test_without_usage_ids_are_counted_or_else_chunks():
    """A server may put several tokens into one chunk; only its own count or the ids tell."""
    assert read_answer([(1, token("a") + token("b"))]).output_tokens == 2
    ids = event({"choices": [{"text": "ab", "token_ids": [5, 6, 7]}]})
    assert read_answer([(1, ids)]).output_tokens == 3


def test_transfer_parameters_are_kept():
    """Those of the last chunk that has some."""
    first, last = ({"choices": [], "kv_transfer_params": {"n": number}} for number in (1, 2))
    assert read_answer([(1, event(first) + event(last) + usage(1, 1))]).kv_transfer_params == {"n": 2}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"error": {"message": "no blocks\n left", "code": 500}}, "error in the stream: no blocks left"),
        ({"error": "no blocks left"}, "error in the stream: no blocks left"),
        ({"choices": "none"}, "unreadable event: Expected `array`, got `str` - at `$.choices`"),
        (b"{", "unreadable event: Input data was truncated"),
        (b'{"error":' + b"[" * 100_000, "unreadable event: maximum recursion depth exceeded"),
    ],
)
def test_what_goes_wrong_is_said(data, error):
    """And what came before is kept."""
    answer = read_answer([(1, token("a") + event(data) + DONE)])
    assert answer.text == "a"
    assert answer.error.startswith(error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>\n  Bad Gateway", "<html> Bad Gateway"),
        (b"\xff", "\ufffd"),
        (b"", ""),
        (b"x" * 999, "x" * 297 + "..."),
        (b"[" * 100_000, "[" * 297 + "..."),
    ],
)
def test_errors_are_one_short_line(body, message):
    """Whatever a server or a proxy says."""
    assert error_message(body) == message
