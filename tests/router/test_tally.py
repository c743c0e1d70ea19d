"""Tokens and times of a stream, counted while it passes."""

import pytest

from kvberth.router.continuation import Continuation
from kvberth.router.fields import Endpoint
from kvberth.router.request import parse_request
from kvberth.router.tally import GAP_BOUNDS, Tally, Times

from .timelines import BEGAN, timeline

TOKEN = b'data: {"choices":[{"index":0,"text":" a"}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"


def tallied(*chunks: bytes, times=None, continuation=None):
    """The timeline of a stream of these chunks, one each second, the times between them, and what was passed on."""
    clock = iter(times or [BEGAN + 1 + number for number in range(len(chunks))])
    gaps = Times(GAP_BOUNDS)
    tally = Tally(lambda: next(clock), gaps, continuation)
    passed = [tally.pass_on(chunk) for chunk in chunks]
    each = timeline(ends_at=100)
    tally.write_to(each)
    return each, gaps, passed


def continuation():
    request = parse_request(Endpoint.COMPLETIONS, b'{"prompt":"p","stream":true}')
    return Continuation(request, shows_ids=False)


def with_ids(*ids: int) -> bytes:
    return (
        b'data: {"choices":[{"index":0,"text":" a","token_ids":%s}],"usage":null}\n\n'
        % str(list(ids)).replace(" ", "").encode()
    )


def test_what_passes_is_unchanged():
    """It only looks."""
    _, _, passed = tallied(TOKEN, TOKEN + TOKEN, DONE)
    assert passed == [TOKEN, TOKEN + TOKEN, DONE]


def test_events_stand_for_tokens_where_nothing_else_is_known():
    """However they are cut into chunks; the end is none."""
    assert tallied(TOKEN, TOKEN + TOKEN, DONE)[0].output_tokens == 3
    assert tallied(TOKEN + TOKEN + TOKEN + DONE)[0].output_tokens == 3


def test_ids_are_tokens():
    """An event may hold several, where the engine was faster than its server."""
    each, _, passed = tallied(with_ids(1, 2, 3), with_ids(4), DONE, continuation=continuation())
    assert each.output_tokens == 4
    assert b"[1,2,3]" not in passed[0]


def test_events_count_where_an_engine_gives_no_ids():
    """It was asked for them, and does not know the question."""
    assert tallied(TOKEN, TOKEN, DONE, continuation=continuation())[0].output_tokens == 2


@pytest.mark.parametrize(
    "end",
    [
        [b'data: {"choices":[],"usage":{"prompt_tokens":9,"total_tokens":16,"completion_tokens":7}}\n\n', DONE],
        [b'data: {"choices":[],"usage":{"prompt_tokens": 9, "completion_tokens": 7}}\n\n' + DONE],
        [
            b'event: message_delta\ndata: {"usage":{"input_tokens":9,"output_tokens":7}}\n\n',
            b"event: message_stop\ndata: {}\n\n",
        ],
        [
            b"event: response.completed\n"
            b'data: {"response":{"usage":{"output_tokens":7,"output_tokens_details":{"reasoning_tokens":3}}}}\n\n'
        ],
    ],
)
def test_usage_is_the_engine_s_own_count(end):
    """OpenAI's APIs and Anthropic's say it behind the last token, in one chunk or several."""
    assert tallied(b'event: message_start\ndata: {"usage":{"output_tokens":0}}\n\n', TOKEN, *end)[0].output_tokens == 7


def test_text_is_not_usage():
    """What a model writes about usage is escaped."""
    text = b'data: {"choices":[{"text":"{\\"completion_tokens\\":7}"}]}\n\n'
    assert tallied(TOKEN, text, DONE)[0].output_tokens == 2


def test_the_last_chunk_ends_the_stream():
    """Not the moment at which the client has read it."""
    assert tallied(TOKEN, TOKEN)[0].last_token_at == 2.0


def test_a_stream_of_which_nothing_came_counts_nothing():
    """Unknown is not 0."""
    each, gaps, _ = tallied()
    assert (each.output_tokens, each.last_token_at, sum(gaps.counts)) == (None, None, 0)


def test_gaps_are_sorted_by_length():
    """As Prometheus has it: up to a bound, the bound included, and one place for all that are longer."""
    times = [0.0, GAP_BOUNDS[-1], GAP_BOUNDS[-1], 1000.0]
    _, gaps, _ = tallied(TOKEN, TOKEN, TOKEN, TOKEN, times=times)
    assert [(index, count) for index, count in enumerate(gaps.counts) if count] == [
        (0, 1),
        (len(GAP_BOUNDS) - 1, 1),
        (len(GAP_BOUNDS), 1),
    ]
    assert gaps.total_seconds == 1000
