"""The file that names engines."""

import pytest

from kvberth.router.engines import Role
from kvberth.router.engines_file import EnginesFileError, NamedEngine, parse_engines, read_engines_file


def test_a_line_is_a_url_and_perhaps_a_role():
    """Comments, empty lines and blanks mean nothing."""
    text = "# ours\n\n  http://a:1/  prefill # the big one\nhttp://b:2\tdecode\r\nhttps://c\n"
    assert parse_engines(text) == [
        NamedEngine("http://a:1", Role.PREFILL),
        NamedEngine("http://b:2", Role.DECODE),
        NamedEngine("https://c"),
    ]


@pytest.mark.parametrize("text", ["", "\n", "# nobody yet"])
def test_a_file_may_name_nobody(text):
    """All engines have gone: that is no mistake of the file."""
    assert parse_engines(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://a\n\na:1", r"line 3: 'a:1' is no engine URL"),
        ("http://a both", "line 1: expected a URL and perhaps prefill or decode, got 'both'"),
        ("http://a prefill decode", "line 1: .*'prefill decode'"),
        ("http://a\nhttp://a/", "line 2: http://a is named more than once"),
        ("http://a:notaport", "line 1: .*no engine URL"),
    ],
)
def test_a_mistake_is_named_with_its_line(text, problem):
    """Who wrote it finds it."""
    with pytest.raises(ValueError, match=problem):
        parse_engines(text)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    """It is not there, is no text, or has a mistake."""
    path = tmp_path / "engines"
    with pytest.raises(EnginesFileError, match=f"{path}: cannot be read: No such file"):
        read_engines_file(path)
    path.write_bytes(b"\xff")
    with pytest.raises(EnginesFileError, match=f"{path}: is not UTF-8"):
        read_engines_file(path)
    path.write_text("nonsense")
    with pytest.raises(EnginesFileError, match=f"{path}: line 1"):
        read_engines_file(path)
    path.write_text("http://a")
    assert read_engines_file(path) == [NamedEngine("http://a")]
