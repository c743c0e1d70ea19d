"""The server under test: where it is, how it is spoken to, which model it has."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvberth.bench.errors import TargetError
from kvberth.bench.stream import error_message

__all__ = ["Target", "describe", "find_model", "open_session"]

# vLLM closes a connection that was idle for 5 s. One that is younger is not closed while a request is on its way.
_IDLE_SECONDS = 2.0
_MODELS_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test.

    Attributes:
        url: its base, without `/v1`.
        model: the name to ask for; None takes the first that `/v1/models` lists.
        headers: sent with each request; names are kept in lower case.
        timeout_seconds: the longest that one request may take.
        extra_body: further fields of each request's body, such as `{"return_token_ids": True}`.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 120.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url: {self.url!r} is no server's URL, expected something like http://127.0.0.1:8000")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds: must be above 0 and finite, not {self.timeout_seconds}")
        for name, value in self.headers.items():
            if not name or not f"{name}{value}".isprintable() or not f"{name}{value}".isascii():
                raise ValueError(f"headers: {name!r} and its value must be printable ASCII")
        object.__setattr__(self, "headers", {name.lower(): value for name, value in self.headers.items()})


def open_session() -> aiohttp.ClientSession:
    """The connections of one run, without a bound on their number."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"accept-encoding": "identity"},  # a compressed stream would be held back until it is worth packing
    )


async def find_model(session: aiohttp.ClientSession, target: Target) -> str:
    """The first model that the server lists. Raises `TargetError` if it lists none or is not there."""
    url = f"{target.url}/v1/models"
    try:
        async with asyncio.timeout(_MODELS_PATIENCE_SECONDS), session.get(url, headers=target.headers) as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError(f"{url} does not answer: {describe(error)}") from error
    if response.status != 200:
        raise TargetError(f"{url} answered {response.status}: {error_message(body)}")
    try:
        model = msgspec.json.decode(body)["data"][0]["id"]
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        model = None
    if not isinstance(model, str):
        raise TargetError(f"{url} lists no model; name one with the setting 'model'")
    return model


def describe(error: Exception) -> str:
    """What an exception says, or else its kind."""
    return str(error) or type(error).__name__
