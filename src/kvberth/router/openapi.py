"""What the router serves, as OpenAPI for tools. It says what the router itself decides; the bodies are vLLM's to judge.

A test holds it equal to the application's routes, but for the admin API, which is not described on purpose (see
`admin.py`).
"""

from typing import Any

from kvberth import __version__
from kvberth.router.binding import Binding
from kvberth.router.config import Mode
from kvberth.router.fields import Endpoint
from kvberth.router.headers import BINDING, MODE, TIMEOUT
from kvberth.router.page import PAGE_PARTS
from kvberth.router.relay import Relayed

__all__ = ["description"]

_JSON_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_ERROR = {"description": "An error, in the form of the endpoint's API", "content": _JSON_OBJECT}
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_TIMEOUT_HEADER = {
    "name": TIMEOUT,
    "in": "header",
    "description": "This request's own deadline; the router's total timeout, if shorter, counts.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_MODE_HEADER = {
    "name": MODE,
    "in": "header",
    "description": "Who moves this request's KV cache",
    "schema": {"type": "string", "enum": list(Mode)},
}
_BINDING_HEADER = {
    "name": BINDING,
    "in": "header",
    "description": "When this request's decode worker is chosen",
    "schema": {"type": "string", "enum": list(Binding)},
}
_STATELESS = "Answered with 404: responses are not stored"
_PAGE = {"text/html": {"schema": {"type": "string"}}}
_PART = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def description(*, with_keys: bool) -> dict[str, Any]:
    """The whole document; `with_keys` if clients need one."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kvberth router", "version": __version__},
        "paths": {
            **{path: {"post": _generation(path)} for path in Endpoint},
            **{path: {"post": _relayed(path)} for path in Relayed},
            "/v1/responses/{id}": {
                "get": _get(_STATELESS, [_ID]),
                "delete": _get(_STATELESS, [_ID]),
            },
            "/v1/responses/{id}/cancel": {"post": _get(_STATELESS, [_ID])},
            "/v1/models": {"get": _get("The models that are served")},
            "/v1/models/{id}": {"get": _get("What an engine says of one model", [_ID, _TIMEOUT_HEADER])},
            "/health": {"get": _get("Whether requests can be served, and each engine's state")},
            "/metrics": {"get": _get("For Prometheus", content={"text/plain": {"schema": {"type": "string"}}})},
            "/version": {"get": _get("The router's version")},
            "/ping": {"get": _get("200", content={}), "post": _get("200", content={})},
            "/openapi.json": {"get": _get("This document")},
            "/": {"get": _get("A page for people", content=_PAGE)},
            PAGE_PARTS: {"get": _get("A part of the page", [_PART], {"*/*": {}})},
        },
    }
    if with_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        document["components"] = {"securitySchemes": {"bearer": bearer}}
        document["security"] = [{"bearer": []}]
        for path in ("/health", "/metrics", "/ping", "/", PAGE_PARTS):
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document


def _generation(path: str) -> dict[str, Any]:
    summary = f"{path}, by a prefill and a decode worker"
    operation = _get(summary, [_MODE_HEADER, _BINDING_HEADER, _TIMEOUT_HEADER], _JSON_OBJECT | _STREAM)
    return operation | {"requestBody": {"required": True, "content": _JSON_OBJECT}}


def _relayed(path: str) -> dict[str, Any]:
    # Whatever comes goes on to the engine.
    body: dict[str, Any] = {"content": {"application/json": {"schema": {}}}}
    return _get(f"{path}, by one engine", [_TIMEOUT_HEADER]) | {"requestBody": body}


def _get(
    summary: str, parameters: list[dict[str, Any]] | None = None, content: dict[str, Any] | None = None
) -> dict[str, Any]:
    done = {"description": "Done", "content": _JSON_OBJECT if content is None else content}
    return {"summary": summary, "parameters": parameters or [], "responses": {"200": done, "default": _ERROR}}
