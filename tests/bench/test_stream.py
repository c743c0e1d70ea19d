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


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "role", "text", "token_ids", "usage", "error"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(anything.map(event) | st.binary(max_size=40), max_size=6))
def test_whatever_a_server_sends_is_an_answer(pieces):
    """Or an error in one; nothing is raised, and no token is made up."""
    answer = read_answer(enumerate(pieces))
    assert len(answer.chunk_times_ns) == len(answer.token_ids) <= sum(piece.count(b"data:") for piece in pieces)


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


def chat(delta, finish_reason=None, **more):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, **more}]})


def test_a_chat():
    """Its texts are in deltas; what only names the role or the end is no token."""
    role, end = chat({"role": "assistant", "content": ""}), chat({}, "length")
    answer = read_answer([(1, role), (2, chat({"content": "a"})), (3, chat({"content": ""})), (4, end + DONE)])
    assert (answer.text, answer.content, answer.chunk_times_ns) == ("a", "a", [2, 3])


def test_a_chat_whose_role_comes_with_a_token():
    """And whose last token comes with the reason of the end."""
    pieces = [(1, chat({"role": "assistant", "content": "a"})), (2, chat({"content": "b"}, "length") + DONE)]
    answer = read_answer(pieces)
    assert (answer.text, answer.chunk_times_ns) == ("ab", [1, 2])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_text_but_not_told_to_the_next_turn(name):
    """Its tokens count like others."""
    answer = read_answer([(1, chat({name: "hm"})), (2, chat({"content": "a"}) + DONE)])
    assert (answer.text, answer.content, answer.output_tokens) == ("hma", "a", 2)


def test_token_ids_are_kept_by_chunk():
    """They say how many tokens came together; without some of them that is not known."""
    first, second = ({"choices": [{"text": "x", "token_ids": ids}]} for ids in ([5, 6], [7]))
    answer = read_answer([(1, event(first)), (2, event(second) + usage(4, 3) + DONE)])
    assert (answer.token_ids, answer.has_all_ids) == ([[5, 6], [7]], True)
    assert not read_answer([(1, event(first) + token("x") + usage(4, 3) + DONE)]).has_all_ids


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
        (
            {"choices": [{"text": "a", "token_ids": [2**31]}]},
            "unreadable event: Expected `int` <= 2147483647 - at `$.choices[0].token_ids[0]`",
        ),
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
