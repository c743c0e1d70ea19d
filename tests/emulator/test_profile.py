"""Profiles: those that come with kvberth, and what is refused in a user's own."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.emulator import EmulatorError, Profile, load_profile, profile_names
from kvberth.emulator.profile import SLOT_BYTES, Timing, dump_profile, parse_profile

SHIPPED = ["llama-3.3-70b-8xh100", "qwen3-32b-8xh200", "small"]
SMALL = dump_profile(load_profile("small"))
FIGURES = [
    f"{table}.{key}"
    for table in ("model", "engine", "timing", "link")
    for key, value in msgspec.to_builtins(load_profile("small"))[table].items()
    if not isinstance(value, str)
]


def changed(figure: str, value: str) -> str:
    """The small profile with one figure replaced; no value takes the figure out."""
    table, key = figure.split(".")
    before, after = SMALL.split(f"[{table}]\n")
    line = f"{key} = {value}\n" if value else ""
    after, count = re.subn(rf"^{key} = .*\n", line, after, count=1, flags=re.MULTILINE)
    assert count == 1
    return f"{before}[{table}]\n{after}"


def without_sources(*names: str) -> str:
    """The small profile with other sources."""
    head, _ = SMALL.split("[sources]\n")
    return head + "[sources]\n" + "".join(f'"{name}" = "somewhere"\n' for name in names)


# What comes with kvberth.


def test_the_shipped_ones_are_listed():
    """By name, in order."""
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_has_a_source(name):
    """For itself or with its table, and no source is of a figure that is not there."""
    profile = load_profile(name)
    assert profile.name == name
    figures = {
        f"{table}.{key}"
        for table in ("model", "engine", "timing", "link")
        for key, value in msgspec.to_builtins(profile)[table].items()
        if not isinstance(value, str)
    }
    assert {figure for figure in figures if not {figure, figure.split(".")[0]} & set(profile.sources)} == set()
    assert set(profile.sources) <= figures | {"model", "engine", "timing", "link"}
    assert all(profile.sources.values())


@pytest.mark.parametrize(
    ("name", "true_bytes", "emulated_bytes", "scale"),
    [("qwen3-32b-8xh200", 262_144, 512, 512), ("llama-3.3-70b-8xh100", 327_680, 640, 512), ("small", 2048, 32, 64)],
)
def test_bytes_per_token(name, true_bytes, emulated_bytes, scale):
    """Keys and values of all heads in all layers, against a few bytes per head slot and layer."""
    profile = load_profile(name)
    assert (profile.true_token_bytes, profile.emulated_token_bytes) == (true_bytes, emulated_bytes)
    assert profile.bytes_scale == scale
    assert emulated_bytes == profile.model.layers * 2 * SLOT_BYTES


# What is refused.


def test_an_unknown_name_lists_those_that_there_are():
    """And says that a file would do."""
    with pytest.raises(EmulatorError) as raised:
        load_profile("smal")
    assert str(raised.value) == (
        f"there is no profile smal: give one of {', '.join(SHIPPED)}, or the path of a .toml file"
    )


def test_a_file_that_is_not_there_is_told(tmp_path):
    """In the system's words."""
    path = tmp_path / "mine.toml"
    with pytest.raises(EmulatorError, match=f"^profile {path}: No such file or directory$"):
        load_profile(path)
    path.mkdir()
    with pytest.raises(EmulatorError, match="Is a directory"):
        load_profile(str(path))


def test_a_file_that_is_no_text_is_told(tmp_path):
    """As any other file that holds no profile."""
    path = tmp_path / "mine.toml"
    path.write_bytes(b'name = "\xff"\n')
    with pytest.raises(EmulatorError, match=r"mine\.toml"):
        load_profile(path)


def test_a_user_s_own_file_is_a_profile(tmp_path):
    """By its path, as text or not."""
    path = tmp_path / "mine.toml"
    path.write_text(changed("timing.step_us", "1.5"))
    assert load_profile(path).timing.step_us == 1.5
    assert load_profile(str(path)) == load_profile(path)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_missing_figure_is_named(figure):
    """With its table."""
    table, key = figure.split(".")
    with pytest.raises(EmulatorError, match=rf"^profile mine: .*missing required field `{key}` - at `\$.{table}`"):
        parse_profile(changed(figure, ""), "mine")


@pytest.mark.parametrize("table", ["model", "engine", "timing", "link", "sources"])
def test_a_missing_table_is_named(table):
    """Each is needed."""
    text = re.sub(rf"\[{table}\]\n([^\[].*\n)*", "", SMALL)
    with pytest.raises(EmulatorError, match=f"^profile mine: .*missing required field `{table}`"):
        parse_profile(text, "mine")


@pytest.mark.parametrize(
    ("text", "where"),
    [("titel = 1\n" + SMALL, "titel"), (SMALL.replace("[timing]\n", "[timing]\nstep_ms = 1\n"), "step_ms")],
)
def test_an_unknown_key_is_named(text, where):
    """A figure that is spelt wrong is not passed over."""
    with pytest.raises(EmulatorError, match=f"^profile mine: .*unknown field `{where}`"):
        parse_profile(text, "mine")


@pytest.mark.parametrize("text", ["name = ", "name = 1", "[timing]\nstep_us = 'fast'", ""])
def test_what_is_no_profile_is_told(text):
    """Whether it is no TOML or no profile."""
    with pytest.raises(EmulatorError, match=r"^profile mine: ."):
        parse_profile(text, "mine")


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_without_a_source_is_named(figure):
    """A figure's own source or its table's will do; all others have one here."""
    table, key = figure.split(".")
    others = [each for each in FIGURES if each != figure]
    with pytest.raises(EmulatorError, match=f"^profile small: {table}.{key} has no source; add it to"):
        parse_profile(without_sources(*others), "mine")
    for enough in (figure, table):
        assert parse_profile(without_sources(*others, enough), "mine").sources[enough] == "somewhere"


@pytest.mark.parametrize("figure", FIGURES)
def test_a_negative_figure_is_named(figure):
    """None makes sense below 0."""
    with pytest.raises(EmulatorError, match=f"^profile small: {figure} must be (above 0|0 or more), not -1"):
        parse_profile(changed(figure, "-1"), "mine")


@pytest.mark.parametrize("figure", [each for each in FIGURES if each.split(".")[0] in {"model", "engine"}])
def test_a_count_of_zero_is_named(figure):
    """Layers, heads, blocks: there is at least one."""
    with pytest.raises(EmulatorError, match=f"^profile small: {figure} must be above 0, not 0"):
        parse_profile(changed(figure, "0"), "mine")


def test_a_link_without_bandwidth_is_refused():
    """A transfer would never end."""
    with pytest.raises(EmulatorError, match=r"^profile small: link.bandwidth_gbps must be above 0, not 0.0$"):
        parse_profile(changed("link.bandwidth_gbps", "0.0"), "mine")


@pytest.mark.parametrize("figure", [each for each in FIGURES if each.startswith("timing.")] + ["link.latency_us"])
def test_a_term_of_zero_is_a_profile(figure):
    """A term that is left out of the model."""
    table, key = figure.split(".")
    assert getattr(getattr(parse_profile(changed(figure, "0.0"), "mine"), table), key) == 0.0


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("figure", ["timing.step_us", "link.bandwidth_gbps"])
def test_a_figure_that_is_no_number_is_refused(figure, value):
    """TOML can say nan and inf."""
    with pytest.raises(EmulatorError, match=figure):
        parse_profile(changed(figure, value), "mine")


# What is written is what is read.


@pytest.mark.parametrize("name", SHIPPED)
def test_a_written_profile_is_the_same(name):
    """All of it, sources as well."""
    assert parse_profile(dump_profile(load_profile(name)), "again") == load_profile(name)


POSITIVE = st.floats(0, allow_infinity=False, exclude_min=True)


@given(st.tuples(*[POSITIVE] * 5), POSITIVE, POSITIVE)
def test_any_figures_survive(coefficients, bandwidth, latency):
    """To the last bit, however large or small."""
    small = load_profile("small")
    profile = msgspec.structs.replace(
        small,
        timing=Timing(**dict(zip(Timing.__struct_fields__, coefficients, strict=True))),
        link=msgspec.structs.replace(small.link, bandwidth_gbps=bandwidth, latency_us=latency),
    )
    assert parse_profile(dump_profile(profile), "again") == profile


PRINTABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"]))


@given(PRINTABLE, PRINTABLE, st.dictionaries(PRINTABLE, PRINTABLE))
def test_any_text_survives(title, source, more):
    """Quotes, backslashes and all scripts, as keys of the sources too."""
    small = load_profile("small")
    profile = msgspec.structs.replace(small, title=title, sources={**more, **small.sources, "link": source})
    assert parse_profile(dump_profile(profile), "again") == profile


def test_the_path_may_be_a_path_or_text():
    """As `--model` and Python have it."""
    assert load_profile(Path("small")) == load_profile("small")
    assert isinstance(load_profile("small"), Profile)
