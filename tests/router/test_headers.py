"""Which headers pass."""

from kvberth.router.headers import request_headers, response_headers


def test_request_headers_for_an_engine():
    """What speaks of the client's connection, or is ours to say, is replaced; the rest passes, repeated ones too."""
    client = [
        ("Host", "router"),
        ("Authorization", "Bearer x"),
        ("Connection", "keep-alive, X-Private"),
        ("X-Private", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "5"),
        ("Accept-Encoding", "gzip"),
        ("Expect", "100-continue"),
        ("X-Request-Id", "theirs"),
        ("X-Kvberth-Mode", "pull"),
        ("X-Kvberth-Timeout-Seconds", "1"),
        ("Baggage", "a=1"),
        ("Baggage", "b=2"),
    ]
    assert request_headers(client, "id") == [
        ("authorization", "Bearer x"),
        ("baggage", "a=1"),
        ("baggage", "b=2"),
        ("x-request-id", "id"),
        ("accept-encoding", "identity"),
    ]


def test_a_clients_key_can_be_kept_from_engines():
    """In both spellings."""
    client = [("Authorization", "Bearer x"), ("X-Api-Key", "x"), ("Traceparent", "t")]
    assert request_headers(client, "id", with_credentials=False)[:-2] == [("traceparent", "t")]


def test_response_headers_for_the_client():
    """The engine's connection, length, packing and date end at the router."""
    engine = [
        ("Date", "today"),
        ("Server", "uvicorn"),
        ("Content-Type", "application/json"),
        ("Content-Length", "5"),
        ("Content-Encoding", "gzip"),
        ("Keep-Alive", "timeout=5"),
        ("X-Request-Id", "x"),
        ("Endpoint-Load-Metrics", "y"),
    ]
    assert response_headers(engine) == (("content-type", "application/json"), ("endpoint-load-metrics", "y"))
