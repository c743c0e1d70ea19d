"""The emulator's part of vLLM's `additional_config`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.emulator.errors import EmulatorError
from kvberth.emulator.settings import EmulatorSettings

KEY = "kvberth_emulator"


@pytest.mark.parametrize("config", [None, {}, {"other": {"link": True}}, {KEY: {}}, "text"])
def test_who_says_nothing_gets_the_defaults(config):
    """No link, and NIXL's progress thread rests for a millisecond."""
    assert EmulatorSettings.of(config) == EmulatorSettings(link=False, nixl_progress_delay_us=1000, counters="")


def test_what_is_said_counts():
    """And the rest keeps its defaults."""
    settings = EmulatorSettings.of({KEY: {"link": True, "nixl_progress_delay_us": 0}})
    assert (settings.link, settings.nixl_progress_delay_us, settings.counters) == (True, 0, "")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"lnik": True}, "unknown field `lnik`"),
        ({"link": 1}, r"Expected `bool`, got `int` - at `\$.link`"),
        ({"nixl_progress_delay_us": "1000"}, r"Expected `int`, got `str` - at `\$.nixl_progress_delay_us`"),
        ({"nixl_progress_delay_us": 0.5}, r"Expected `int`, got `float` - at `\$.nixl_progress_delay_us`"),
        ("on", "got `str`"),
        (None, "got `null`|got `None`"),
    ],
)
def test_what_cannot_be_is_named(table, text):
    """Where it was said, what is wrong, and which settings there are."""
    with pytest.raises(EmulatorError, match=f"^additional-config {KEY}: .*({text})") as raised:
        EmulatorSettings.of({KEY: table})
    assert str(raised.value).endswith("the settings are link, nixl_progress_delay_us")


def test_a_negative_rest_is_refused():
    """0 is NIXL's own."""
    with pytest.raises(EmulatorError, match=f"^additional-config {KEY}: nixl_progress_delay_us must be 0 or more$"):
        EmulatorSettings.of({KEY: {"nixl_progress_delay_us": -1}})


def test_what_is_counted_has_all_its_other_settings():
    """Faults among them: a drill's engines had none for as long as they were forgotten here."""
    settings = EmulatorSettings(link=True, nixl_progress_delay_us=7, faults="f")
    assert settings.counting(Path("c")) == EmulatorSettings(
        link=True, nixl_progress_delay_us=7, faults="f", counters="c"
    )


@given(st.booleans(), st.integers(0, 10**9), st.text())
def test_what_is_stored_is_what_is_read(link, delay, counters):
    """The engine's other processes get the settings, and all else stays in its place."""
    settings = EmulatorSettings(link=link, nixl_progress_delay_us=delay, counters=counters)
    config = {"other": 1, KEY: {"link": not link}}
    settings.store(config)
    assert EmulatorSettings.of(config) == settings
    assert config["other"] == 1
