"""What vLLM asks before anything else: whether this process is to be emulated."""

import pytest

from kvberth.emulator import SWITCH, is_on, platform


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on"])
def test_it_is_on(monkeypatch, value):
    """vLLM gets the platform."""
    monkeypatch.setenv(SWITCH, value)
    assert is_on()
    assert platform() == "kvberth.emulator.platform.EmulatedPlatform"


@pytest.mark.parametrize("value", ["", "0", "false", "off", "no", None])
def test_it_is_off(monkeypatch, value):
    """vLLM is left alone."""
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    assert not is_on()
    assert platform() is None
