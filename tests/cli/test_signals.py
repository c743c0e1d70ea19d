"""How long work is ended."""

import signal

import pytest

from kvberth.cli.signals import terminate_like_ctrl_c


@pytest.mark.parametrize("on_ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_ends_it(on_ctrl_c):
    """In the background of a script too, where Ctrl-C is ignored; afterwards all is as it was."""
    before = signal.signal(signal.SIGINT, on_ctrl_c)
    of_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), terminate_like_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is of_sigterm
    finally:
        signal.signal(signal.SIGINT, before)
