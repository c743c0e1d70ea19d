"""The router's errors in the words of each API."""

import json

import pytest

from kvberth.router.errors import RouterError
from kvberth.router.forms import error_event, error_response, is_preamble, readable_error

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ERROR = RouterError(400, "no", code="c", param="p")
OPENAI = {"error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": "c"}}
ANTHROPIC = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (CHAT, OPENAI),
        (RESPONSES, OPENAI),
        ("/nowhere", OPENAI),
        ("/v1/messages_of_mine", OPENAI),
        (MESSAGES, ANTHROPIC),
        (f"{MESSAGES}/count_tokens", ANTHROPIC),
    ],
)
def test_an_error_as_an_answer(path, said):
    """Each client finds the message where its API has it."""
    assert json.loads(error_response(path, ERROR)) == said


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_types_of_anthropic_errors(status, kind):
    """Their clients choose by it whether to try again."""
    assert json.loads(error_response(MESSAGES, RouterError(status, "m", code="c")))["error"]["type"] == kind


def data_of(event):
    return json.loads(event.partition(b"data: ")[2])


def test_an_error_as_an_event():
    """The last one of a stream, named where the API names its events."""
    assert error_event(CHAT, ERROR).startswith(b"data: ")
    assert data_of(error_event(CHAT, ERROR)) == OPENAI
    assert error_event(MESSAGES, ERROR).startswith(b"event: error\ndata: ")
    assert data_of(error_event(MESSAGES, ERROR)) == ANTHROPIC
    assert error_event(RESPONSES, ERROR).startswith(b"event: error\ndata: ")
    flat = {"type": "error", "code": "c", "message": "no", "param": "p"}
    assert data_of(error_event(RESPONSES, ERROR)) == flat | OPENAI
    assert all(error_event(path, ERROR).endswith(b"\n\n") for path in (CHAT, RESPONSES, MESSAGES))


@pytest.mark.parametrize("said", [OPENAI, ANTHROPIC])
def test_what_an_engine_says_readably_passes(said):
    """Its own words are better than ours."""
    body = json.dumps(said).encode()
    assert readable_error(MESSAGES, 500, body, leg="decode") == body


@pytest.mark.parametrize("body", [b"Internal Server Error", b"{}", b"\xff", b"[" * 100_000])
def test_what_nobody_can_read_is_replaced(body):
    """By an error in the API's form that names the leg."""
    said = json.loads(readable_error(MESSAGES, 500, body, leg="decode"))
    assert (said["type"], said["error"]["message"]) == ("error", "The decode leg's engine answered 500.")
    assert json.loads(readable_error(CHAT, 500, body, leg="decode"))["error"]["code"] == "decode_failed"


CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
ADDED = b"event: response.output_item.added\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("stream", "says_nothing"),
    [
        (CREATED, True),
        (CREATED + IN_PROGRESS, True),
        (CREATED + IN_PROGRESS[:8], True),
        (CREATED + IN_PROGRESS[:60], True),
        (CREATED + IN_PROGRESS + ADDED, False),
        (CREATED + IN_PROGRESS + ADDED[:20], False),
        (ADDED, False),
        (b"", False),
    ],
)
def test_what_a_response_begins_with_says_nothing_of_the_answer(stream, says_nothing):
    """vLLM sends two events before it has scheduled anything; other endpoints have no such."""
    assert is_preamble("/v1/responses", stream) is says_nothing
    assert not is_preamble("/v1/chat/completions", stream)
