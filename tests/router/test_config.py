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
        ({"decode": ()}, "decode"),
        ({"prefill": ("a:1",)}, "prefill: 'a:1'"),
        ({"decode": ("http://a:1",)}, "http://a:1 is named more than once"),
        ({"mode": "shove"}, "shove"),
        ({"connect_timeout_seconds": 0}, "connect_timeout_seconds"),
        ({"first_token_timeout_seconds": -1}, "first_token_timeout_seconds"),
        ({"total_timeout_seconds": 0}, "total_timeout_seconds"),
        ({"health_interval_seconds": 0}, "health_interval_seconds"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
    ],
)
def test_a_wrong_setting_is_named(change, named):
    """One line that says which."""
    with pytest.raises(ValueError, match=named):
        RouterConfig(**(GOOD | change))
