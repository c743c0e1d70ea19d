"""Which headers pass the router, and in which direction. Pure."""

from collections.abc import Iterable

from kvberth.router.answer import Header

__all__ = [
    "ANTHROPIC_REQUEST_ID",
    "BINDING",
    "JSON",
    "MODE",
    "PATH",
    "REASON",
    "REQUEST_ID",
    "TIMEOUT",
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


def request_headers(client: Iterable[Header], request_id: str, *, with_credentials: bool = True) -> list[Header]:
    """The headers for an engine: the client's (tracing among them, its key only `with_credentials`) and ours."""
    kept = _without(client, _OURS_IN_REQUESTS if with_credentials else _OURS_IN_REQUESTS | _CREDENTIALS)
    return [*kept, (REQUEST_ID, request_id), ("accept-encoding", "identity")]


def response_headers(engine: Iterable[Header]) -> tuple[Header, ...]:
    """The headers of an engine's response that go on to the client."""
    return tuple(_without(engine, _OURS_IN_RESPONSES))


def _without(headers: Iterable[Header], names: frozenset[str]) -> list[Header]:
    lowered = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lowered if name == "connection" for token in value.split(",")}
    dropped = _HOP_BY_HOP | names | named
    return [(name, value) for name, value in lowered if name not in dropped]
