"""How long work is ended."""

import signal
from collections.abc import Iterator

import pytest

from kvberth.cli.signals import terminate_like_ctrl_c


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def job(request) -> Iterator[None]:
    """In the background of a script Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("job")
def test_sigterm_ends_it():
    """Afterwards all is as it was."""
    of_sigterm = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_like_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is of_sigterm
