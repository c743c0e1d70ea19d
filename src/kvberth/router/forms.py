"""The router's own errors in the words of the API that a client speaks. Pure.

| path | whole | as the last event of a stream |
| --- | --- | --- |
| `/v1/messages...` | `{"type": "error", "error": {"type", "message"}}` | the same, as event `error` |
| `/v1/responses...` | OpenAI's | OpenAI's error with the fields of the event `error` beside it |
| every other | OpenAI's: `{"error": {"message", "type", "param", "code"}}` | the same, as data |
"""

import msgspec

from kvberth.router.errors import Leg, RouterError

__all__ = ["begins_with_failure", "error_event", "error_response", "is_anthropic", "is_preamble", "readable_error"]

_PREAMBLES = (b"event: response.created\n", b"event: response.in_progress\n")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    return _is_at(path, "/v1/messages")


def error_response(path: str, error: RouterError) -> bytes:
    """The body of an answer that is an error."""
    if not is_anthropic(path):
        return error.body()
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def error_event(path: str, error: RouterError) -> bytes:
    """The last event of a stream that cannot be finished."""
    if is_anthropic(path):
        return b"event: error\ndata: " + error_response(path, error) + b"\n\n"
    if _is_at(path, "/v1/responses"):
        # Client libraries raise on `error` and show the flat fields otherwise, so both are there.
        flat = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        data = msgspec.json.encode(flat | {"error": msgspec.Raw(error.fields())})
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + error.body() + b"\n\n"


def readable_error(path: str, status: int, body: bytes, *, leg: Leg) -> bytes:
    """What an engine said with a 5xx, if a client can read it; otherwise an error that says that the engine failed."""
    try:
        msgspec.json.decode(body, type=_Said)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        failed = RouterError(status, f"The {leg} leg's engine answered {status}.", code=f"{leg}_failed")
        return error_response(path, failed)
    return body


def is_preamble(path: str, stream: bytes) -> bool:
    """Whether an engine's stream says no more than that there is a request, as vLLM's Responses do at once."""
    if not stream or not _is_at(path, "/v1/responses"):
        return False
    events = (event for event in stream.split(b"\n\n") if event)
    return all(event.startswith(_PREAMBLES) or any(each.startswith(event) for each in _PREAMBLES) for event in events)


def begins_with_failure(stream: bytes) -> bool:
    """Whether an engine's stream begins with an error that is not the client's: its request has failed there."""
    if not stream.startswith((b'data: {"error"', b"event: error")):
        return False
    data = stream[stream.index(b"data: ") + 6 :].partition(b"\n")[0] if b"data: " in stream else b""
    try:
        code = msgspec.json.decode(data, type=_Failed).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return not (isinstance(code, int) and 400 <= code < 500)


def _is_at(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


class _ErrorText(msgspec.Struct):
    message: str


class _Said(msgspec.Struct):
    """OpenAI's form and Anthropic's have this much in common."""

    error: _ErrorText


class _ErrorCode(msgspec.Struct):
    code: int | str | None = None


class _Failed(msgspec.Struct):
    error: _ErrorCode
