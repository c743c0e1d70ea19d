"""The page for people at `/`: what the admin API and `/health` say, drawn by the browser.

It holds no data itself, so it is open to everybody; what it asks for is not. Its parts are files without a build step,
each served under its own name, so that its policy can forbid every script and style that is not one of them: what
clients choose, such as the id of a request, can never become code.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvberth.router.hosts import HostNames

__all__ = ["PAGE_PARTS", "is_page", "page_routes"]

PAGE_PARTS = "/kvberth/page/{name}"

_ROOT = "/"
_FOLDER = PAGE_PARTS.removesuffix("{name}")
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the tab's icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    # With its tag: a router of another version never meets the page of the one before.
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _Part:
    content: bytes
    media_type: str
    tag: str


def page_routes(hosts: HostNames) -> list[Route]:
    """Routes of the page. Its files are read now."""
    parts = _read_parts()

    async def part(request: Request) -> Response:
        if hosts.is_local:
            hosts.check(request.headers.getlist("host"))
        found = parts.get(request.path_params.get("name", _INDEX))
        if found is None:
            raise HTTPException(404)
        return _answer(request, found)

    return [Route(_ROOT, part), Route(PAGE_PARTS, part)]


def is_page(path: str) -> bool:
    """Whether this is the page or one of its parts, which need no key."""
    return path == _ROOT or path.startswith(_FOLDER)


def _read_parts() -> Mapping[str, _Part]:
    parts = {}
    for file in (resources.files(__package__) / "static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            content = file.read_bytes()
            parts[file.name] = _Part(content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return parts


def _answer(request: Request, part: _Part) -> Response:
    headers = {**_HEADERS, "etag": part.tag}
    if part.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(part.content, headers={**headers, "content-type": part.media_type})
