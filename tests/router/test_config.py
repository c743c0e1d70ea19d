"""Settings are checked where they are made."""

import pytest

from kvberth.router import Mode, RouterConfig

GOOD = {"prefill": ("http://a:1",), "decode": ("http://b:2/",)}


def test_urls_and_mode_are_put_in_order():
    """A slash at the end of a URL means nothing; a mode may be given as text."""
    config = RouterConfig(**GOOD, mode="pull")
    assert (config.prefill, config.decode, config.mode) == (("http://a:1",), ("http://b:2",), Mode.PULL)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decode": ()}, "engines, decode, engines_file: at least one"),
        ({"engines": ("a:1",)}, "engines: 'a:1'"),
        ({"engines": ("http://a:1/",)}, "http://a:1 is named more than once"),
        ({"admin_api_key": " "}, "admin_api_key"),
        ({"control_key_file": "router.key_secret"}, "control_key_file, control_peers_dir: one needs the other"),
        ({"admin_api_key": "k", "api_key": ("j", "k")}, "admin_api_key: must not be one of api_key"),
        ({"port": 8001, "admin_port": 8001}, "admin_port: 8001 is the port of the clients' API"),
        ({"admin_port": 8001, "admin_host": "0.0.0.0"}, "admin_host: 0.0.0.0 can be reached by others; admin_api_key"),
        ({"allowed_host": ("http://a",)}, "allowed_host: 'http://a' is no name of a host"),
        ({"allowed_host": ("a:80",)}, "allowed_host: 'a:80' is no name of a host"),
        ({"prefill_policy": "best"}, "best"),
        ({"decode_policy": "queue"}, "queue"),
        ({"affinity_seconds": -1}, "affinity_seconds"),
        ({"affinity_seconds": float("nan")}, "affinity_seconds"),
        ({"prefill": ("a:1",)}, "prefill: 'a:1'"),
        ({"decode": ("http://a:1",)}, "http://a:1 is named more than once"),
        ({"mode": "shove"}, "shove"),
        ({"connect_timeout_seconds": 0}, "connect_timeout_seconds"),
        ({"first_token_timeout_seconds": -1}, "first_token_timeout_seconds"),
        ({"total_timeout_seconds": 0}, "total_timeout_seconds"),
        ({"health_interval_seconds": 0}, "health_interval_seconds"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"client_stall_seconds": 0}, "client_stall_seconds"),
        ({"max_queue": -1}, "max_queue"),
        ({"queue_timeout_seconds": 0}, "queue_timeout_seconds"),
        ({"api_key": ("",)}, "api_key"),
        ({"api_key": ("k\u00e9",)}, "api_key"),
        ({"engine_api_key": "a b"}, "engine_api_key"),
        ({"ssl_certfile": "c"}, "ssl_keyfile"),
        ({"engine_ca_file": "c", "engine_insecure": True}, "engine_insecure"),
    ],
)
def test_a_wrong_setting_is_named(change, named):
    """One line that says which."""
    with pytest.raises(ValueError, match=named):
        RouterConfig(**(GOOD | change))


@pytest.mark.parametrize("change", [{"engines": ("http://a",)}, {"decode": ("http://a",)}, {"engines_file": "f"}])
def test_any_way_to_name_engines_is_enough(change):
    """Also a file that names nobody yet."""
    assert RouterConfig(**change)


def test_the_admin_key_is_not_shown():
    """Settings end up in logs."""
    assert "secret" not in repr(RouterConfig(**GOOD, admin_api_key="secret"))
