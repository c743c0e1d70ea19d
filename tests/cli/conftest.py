"""The command as a user calls it, with cluster and router replaced by fakes that say what they were given."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvberth.launch
import kvberth.router
from kvberth.cli import app


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch):
    """What the developer's own environment sets is not part of any test."""
    for name in [each for each in os.environ if each.startswith(("KVBERTH_", "OTEL_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def kvberth_command():
    """Call it: `kvberth_command("up", "--model", "m")`."""
    return lambda *arguments, **environment: CliRunner().invoke(
        app, [str(each) for each in arguments], env=environment, prog_name="kvberth"
    )


@pytest.fixture
def settings_file(tmp_path):
    """Write a TOML file, get its path."""

    def write(text):
        path = tmp_path / "kvberth.toml"
        path.write_text(text)
        return path

    return write


class FakeCluster:
    """Records its life; `on_enter` and `on_wait` are what happens then."""

    router = object()
    router_url = "http://127.0.0.1:20001"
    undivided = ()
    run_dir = Path("/logs/of/this/run")

    def __init__(self):
        self.settings = None
        self.stops = 0
        self.on_enter = self.on_wait = self.on_exit = lambda: None

    def __call__(self, settings, console=None):
        self.settings, self.console = settings, console
        return self

    def __enter__(self):
        self.on_enter()
        return self

    def __exit__(self, *_):
        self.on_exit()
        self.stops += 1

    def wait(self):
        self.on_wait()


@pytest.fixture
def cluster(monkeypatch):
    """In place of `LocalCluster`."""
    fake = FakeCluster()
    monkeypatch.setattr(kvberth.launch, "LocalCluster", fake)
    return fake


@pytest.fixture
def served(monkeypatch):
    """The configurations that `serve` was called with."""
    configurations = []
    monkeypatch.setattr(kvberth.router, "serve", configurations.append)
    return configurations
