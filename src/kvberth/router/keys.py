"""Lets in only clients that have a key, where the router was given any."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvberth.router.admin import is_view
from kvberth.router.errors import RouterError
from kvberth.router.forms import error_response, is_anthropic
from kvberth.router.page import is_page

__all__ = ["ApiKeys", "Keys"]

# Probes and scrapers have no keys. What the admin API shows looks at its own: who has that one needs no other. The page
# for people holds nothing.
_OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


class ApiKeys:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: "Keys") -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._keys.let_in(scope):
            await self._app(scope, receive, send)
            return
        refused = RouterError(401, "This needs a valid API key.", code="invalid_api_key")
        body = error_response(scope["path"], refused)
        answer = Response(body, 401, headers={"www-authenticate": "Bearer"}, media_type="application/json")
        await answer(scope, receive, send)


class Keys:
    """The clients' keys. With none, everybody is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that the comparison tells nothing of a key's.
        self._digests = [_digest(key.encode()) for key in keys]

    def let_in(self, scope: Scope) -> bool:
        """Whether a request needs no key, or has one."""
        return not self._digests or _is_open(scope["path"]) or self._knows(scope)

    def _knows(self, scope: Scope) -> bool:
        presented = list(_presented(scope["path"], scope["headers"]))
        # Every pair is compared, so that the time taken does not tell which one fits.
        return any([hmac.compare_digest(_digest(key), digest) for key in presented for digest in self._digests])  # noqa: C419


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or is_view(path) or is_page(path)


def _presented(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key" and is_anthropic(path):
            yield value


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
