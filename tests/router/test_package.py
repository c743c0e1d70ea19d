"""What the package promises about itself."""

import ast
import sys
from pathlib import Path

import pytest

import kvberth.router

PURE = (
    *(
        "actions",
        "admission",
        "answer",
        "binding",
        "breaker",
        "choice",
        "config",
        "continuation",
        "deadline",
        "engines",
    ),
    *(
        "errors",
        "events",
        "fields",
        "figures",
        "fleet",
        "forms",
        "headers",
        "hosts",
        "journal",
        "life",
        "load",
        "obstacles",
        "prefix",
        "request",
        "spans",
    ),
    *("tally", "timeline", "transfer"),
)
NOT_IN_PURE = {"asyncio", "httptools", "logging", "socket", "starlette", "threading", "time", "uuid", "uvicorn"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def modules():
    return sorted(Path(kvberth.router.__file__).parent.glob("*.py"))


def test_public_surface():
    """What others may use."""
    assert sorted(kvberth.router.__all__) == ["Mode", "RouterConfig", "create_app", "serve"]


@pytest.mark.parametrize("name", PURE)
def test_decisions_do_no_io(name):
    """Neither they nor what they import of ours looks at a clock, a socket or a loop."""
    path = Path(kvberth.router.__file__).with_name(f"{name}.py")
    imported = set(imports_of(path))
    assert not {each.partition(".")[0] for each in imported} & NOT_IN_PURE
    ours = {each.removeprefix("kvberth.router.") for each in imported if each.startswith("kvberth.")}
    assert ours <= set(PURE)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_there_is_one_clock(path):
    """What one module notes another one compares: arrivals, visits, readings of load and breakers alike.

    The time of day is for people: when a request came.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time"}
    assert used <= {"monotonic"} | ({"time"} if path.stem == "call" else set())
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "time" for node in nodes)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_the_router_stands_alone(path):
    """It knows nothing of vLLM, NIXL or the connector: it runs where none of them is installed.

    What it says to prefill workers are messages of the protocol, which is free of all that, too. OpenTelemetry is an
    extra, which one module imports where traces are asked for.
    """
    allowed = {"httptools", "kvberth", "msgspec", "prometheus_client", "starlette", "uvicorn", "zmq"}
    allowed |= sys.stdlib_module_names | ({"opentelemetry"} if path.stem == "otel" else set())
    imported = set(imports_of(path))
    assert {each.partition(".")[0] for each in imported} <= allowed
    assert all(
        each in ("kvberth", "kvberth.router")
        or not each.startswith("kvberth.")
        or each.startswith(("kvberth.router.", "kvberth.protocol", "kvberth.keys"))
        for each in imported
    )
