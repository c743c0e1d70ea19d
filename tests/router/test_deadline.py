"""How long a request may take, and what its time went into."""

import pytest

from kvberth.router.deadline import Spent, allowed_seconds, queue_timeout
from kvberth.router.errors import RouterError


@pytest.mark.parametrize(
    ("asked", "limit", "seconds"),
    [(None, None, None), (None, 5.0, 5.0), ("3", None, 3.0), ("3", 5.0, 3.0), ("7.5", 5.0, 5.0), ("1e-3", 5.0, 0.001)],
)
def test_the_shorter_time_counts(asked, limit, seconds):
    """A client can ask for less than the router's limit, not for more."""
    assert allowed_seconds(asked, limit) == seconds


@pytest.mark.parametrize("asked", ["", "soon", "0", "-1", "nan", "inf", "1e999", "\u0661s"])
def test_what_is_no_time_is_refused(asked):
    """With the header's name."""
    with pytest.raises(RouterError, match="x-kvberth-timeout-seconds") as caught:
        allowed_seconds(asked, None)
    assert (caught.value.status, caught.value.code) == (400, "invalid_timeout")


@pytest.mark.parametrize(
    ("spent", "code"),
    [
        (Spent(0.0, 9.0, 1.0), "prefill_timeout"),
        (Spent(0.0, 1.0, 9.0), "decode_timeout"),
        (Spent(7.0, 1.0, 2.0), "queue_timeout"),
    ],
)
def test_the_time_is_charged_to_what_used_it(spent, code):
    """Not to what happened to be waited for at the end; the text has all three."""
    error = spent.timeout(10.0)
    assert (error.status, error.code) == (504, code)
    for words in ("10 s", "Queue: ", "prefill leg: ", "decode leg: "):
        assert words in error.message


def test_a_request_that_never_had_its_turn():
    """It has no leg to blame."""
    assert (queue_timeout(2.0).status, queue_timeout(2.0).code) == (504, "queue_timeout")
