"""Which headers pass the router, and in which direction. Pure."""

from collections.abc import Iterable

from kvberth.router.answer import Header
from kvberth.router.forms import is_anthropic

__all__ = [
    "ANTHROPIC_REQUEST_ID",
    "BINDING",
    "JSON",
    "MODE",
    "PATH",
    "REASON",
    "REQUEST_ID",
    "TIMEOUT",
    "id_headers",
    "request_headers",
    "response_headers",
]

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"  # where Anthropic's clients look for it in an answer
MODE = "x-kvberth-mode"
BINDING = "x-kvberth-binding"
TIMEOUT = "x-kvberth-timeout-seconds"
PATH = "x-kvberth-path"
REASON = "x-kvberth-reason"
JSON: Header = ("content-type", "application/json")

# RFC 9110, 7.6.1: these speak of one connection, not of the message.
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization"),
    }
)
# Set anew for each leg: the bodies are ours, and answers are asked for unpacked because they are looked into.
_OURS_IN_REQUESTS = frozenset(
    {"host", "content-length", "content-encoding", "accept-encoding", "expect", REQUEST_ID, MODE, BINDING, TIMEOUT}
)
_CREDENTIALS = frozenset({"authorization", "x-api-key"})
# The client library unpacks, the server dates and counts.
_OURS_IN_RESPONSES = frozenset(
    {"content-length", "content-encoding", "date", "server", REQUEST_ID, PATH, REASON, BINDING}
)
_NOT_PASSED = _HOP_BY_HOP | _OURS_IN_REQUESTS
_NOT_PASSED_WITHOUT_CREDENTIALS = _NOT_PASSED | _CREDENTIALS
_NOT_PASSED_BACK = _HOP_BY_HOP | _OURS_IN_RESPONSES


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """What tells a client the id of its request at this path."""
    names = (REQUEST_ID, ANTHROPIC_REQUEST_ID) if is_anthropic(path) else (REQUEST_ID,)
    return dict.fromkeys(names, request_id)


def request_headers(client: Iterable[Header], request_id: str, *, with_credentials: bool = True) -> list[Header]:
    """The headers for an engine: the client's (tracing among them, its key only `with_credentials`) and ours."""
    kept = _without(client, _NOT_PASSED if with_credentials else _NOT_PASSED_WITHOUT_CREDENTIALS)
    return [*kept, (REQUEST_ID, request_id), ("accept-encoding", "identity")]


def response_headers(engine: Iterable[Header]) -> tuple[Header, ...]:
    """The headers of an engine's response that go on to the client."""
    return tuple(_without(engine, _NOT_PASSED_BACK))


def _without(headers: Iterable[Header], names: frozenset[str]) -> list[Header]:
    lowered = [(name.lower(), value) for name, value in headers]
    for name, value in lowered:
        if name == "connection":
            names = names.union(token.strip().lower() for token in value.split(","))
    return [header for header in lowered if header[0] not in names]
