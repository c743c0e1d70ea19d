"""`kvberth router`: every setting of the router can be given, and means the same there."""

import dataclasses
import sys

import pytest

import kvberth.router
from kvberth.cli.options import Binding, DecodePolicy, Mode, PrefillPolicy
from kvberth.router import Mode as RouterMode
from kvberth.router import RouterConfig
from kvberth.router.binding import Binding as RouterBinding
from kvberth.router.choice import DecodePolicy as RouterDecodePolicy
from kvberth.router.choice import PrefillPolicy as RouterPrefillPolicy
from kvberth.router.tracing import TracingError

OTHER_VALUES = {
    "engines": ("http://e:1", "http://e:2"),
    "prefill": ("http://p:1", "http://p:2"),
    "decode": ("http://d:1",),
    "engines_file": "engines.txt",
    "host": "0.0.0.0",
    "port": 9000,
    "admin_host": "10.0.0.1",
    "admin_port": 9001,
    "admin_api_key": "secret",
    "allowed_host": ("router.test",),
    "mode": RouterMode.PULL,
    "binding": RouterBinding.JIT,
    "connect_timeout_seconds": 1.5,
    "first_token_timeout_seconds": 2.5,
    "total_timeout_seconds": 3.5,
    "health_interval_seconds": 0.5,
    "prefill_policy": RouterPrefillPolicy.ROUND_ROBIN,
    "decode_policy": RouterDecodePolicy.LEAST_LOADED,
    "affinity_seconds": 0.25,
    "local_prefill_tokens": 64,
    "max_retries": 5,
    "client_stall_seconds": 4.5,
    "max_in_flight": 7,
    "max_queue": 9,
    "queue_timeout_seconds": 5.5,
    "max_body_bytes": 8,
    "api_key": ("k1", "k2"),
    "engine_api_key": "k3",
    "ssl_certfile": __file__,
    "ssl_keyfile": __file__,
    "engine_ca_file": __file__,
    "control_key_file": "router.key_secret",
    "control_peers_dir": "keys",
    "otlp_traces_endpoint": "http://collector:4317",
}
FLAGS = {"engines": "--engine"}  # repeated, and so in the singular
OTHER_FLAGS = {"engine_insecure", "continue_streams"}  # contradicts another one; a switch


def test_every_setting_has_a_flag(kvberth_command, served):
    """A setting that is added to the router must be added to the command."""
    assert OTHER_VALUES.keys() | OTHER_FLAGS == {field.name for field in dataclasses.fields(RouterConfig)}
    flags = []
    for name, value in OTHER_VALUES.items():
        for each in value if isinstance(value, tuple) else [value]:
            flags += [FLAGS.get(name, f"--{name.replace('_', '-')}"), each]
    assert kvberth_command("router", *flags).exit_code == 0
    assert served == [RouterConfig(**OTHER_VALUES)]


def test_streams_need_not_be_continued(kvberth_command, served):
    """A switch that is on without being given."""
    assert kvberth_command("router", "--decode", "http://d:1", "--no-continue-streams").exit_code == 0
    assert [each.continue_streams for each in served] == [False]


def test_certificates_need_not_be_checked(kvberth_command, served):
    """A switch without a value."""
    assert kvberth_command("router", "--decode", "https://d:1", "--engine-insecure").exit_code == 0
    assert served == [RouterConfig(prefill=(), decode=("https://d:1",), engine_insecure=True)]


def test_keys_come_from_the_environment(kvberth_command, served, monkeypatch):
    """They need not stand in the list of processes."""
    monkeypatch.setenv("KVBERTH_ROUTER_API_KEY", "k1 k2")
    monkeypatch.setenv("KVBERTH_ENGINE_API_KEY", "k3")
    assert kvberth_command("router", "--decode", "http://d:1").exit_code == 0
    assert (served[0].api_key, served[0].engine_api_key) == (("k1", "k2"), "k3")
    assert "k1" not in repr(served[0])
    assert "k3" not in repr(served[0])


def test_defaults_are_the_router_s_own(kvberth_command, served):
    """The command repeats the defaults, so that --help shows them, and repeats them right."""
    kvberth_command("router", "--decode", "http://d:1")
    assert served == [RouterConfig(prefill=(), decode=("http://d:1",))]


@pytest.mark.parametrize(
    ("own", "router"),
    [
        (Mode, RouterMode),
        (Binding, RouterBinding),
        (PrefillPolicy, RouterPrefillPolicy),
        (DecodePolicy, RouterDecodePolicy),
    ],
)
def test_choices_are_the_router_s(own, router):
    """The command's own copies of enums, there for a quick start, have not drifted."""
    assert {each.value for each in own} == {each.value for each in router}


def test_the_admin_key_may_come_from_the_environment(kvberth_command, served, monkeypatch):
    """Flags can be read by everyone on the machine."""
    monkeypatch.setenv("KVBERTH_ADMIN_API_KEY", "secret")
    kvberth_command("router", "--engine", "http://e:1")
    assert served == [RouterConfig(engines=("http://e:1",), admin_api_key="secret")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "engines, decode, engines_file: at least one is needed, or nobody could answer"),
        (["--decode", "d:1"], "decode: 'd:1' is no engine URL, expected something like http://127.0.0.1:8001"),
        (["--decode", "http://d", "--max-in-flight", "0"], "max_in_flight: must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_one_line(kvberth_command, served, flags, message):
    """What is wrong and what would be right, exit status 2, and nothing is served."""
    result = kvberth_command("router", *flags)
    assert (result.exit_code, result.stderr) == (2, f"kvberth: {message}\n")
    assert not served


def test_a_router_that_cannot_start_fails(kvberth_command, monkeypatch):
    """Exit status 1, whatever the server's own is; it has logged the reason."""
    monkeypatch.setattr(kvberth.router, "serve", lambda _: sys.exit(3))
    result = kvberth_command("router", "--decode", "http://d:1")
    assert result.exit_code == 1
    assert "the router could not start on 127.0.0.1:8000; the log above says why" in result.stderr


def test_an_engines_file_that_cannot_be_used_is_one_line(kvberth_command, tmp_path):
    """At the start a mistake in it ends the command; later it changes nothing."""
    path = tmp_path / "engines"
    path.write_text("http://a\nhttp://b both\n")
    result = kvberth_command("router", "--engines-file", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kvberth: {path}: line 2: ")
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_certificate_is_named(kvberth_command):
    """One line, before anything listens."""
    result = kvberth_command("router", "--decode", "https://d:1", "--engine-ca-file", __file__)
    assert result.exit_code == 2
    assert "a certificate or key cannot be used" in result.stderr


def test_traces_that_cannot_be_made_are_one_line(kvberth_command, monkeypatch):
    """The endpoint may come from OpenTelemetry's own variable; what it lacks is said before anything starts."""
    settings = []

    def serve(config):
        settings.append(config)
        raise TracingError("otlp_traces_endpoint: needs OpenTelemetry")

    monkeypatch.setattr(kvberth.router, "serve", serve)
    result = kvberth_command(
        "router", "--decode", "http://d:1", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://collector:4317"
    )
    assert settings[0].otlp_traces_endpoint == "http://collector:4317"
    assert (result.exit_code, result.stderr) == (2, "kvberth: otlp_traces_endpoint: needs OpenTelemetry\n")
