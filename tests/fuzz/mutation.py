"""Changes to inputs that a fuzzer makes: of text by what readers of text trip over, of values by their kind."""

import random
import re
from collections.abc import Sequence

__all__ = ["changed_text", "changed_value"]

_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?")
_ODD_TEXT = (
    *(b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b'"', b"'", b"\\"),
    *(b",", b":", b"{", b"}", b"[", b"]", b"[[", b"{}", b"[]", b"null", b"true", b"false", b'""', b" ", b"\t", b"-"),
    *(b'"a":', b"\xe2\x80\xa8", b"%", b"e9", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"a" * 5000),
)
_ODD_NUMBERS = (
    *(b"0", b"-0", b"-1", b"1", b"00", b"1.0", b"1e3", b"1e400", b"-1e400", b"1e-400", b"NaN", b"Infinity", b"0x10"),
    *(b"2147483648", b"4294967296", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616"),
    *(b"10000000", b"10000001", b"9" * 400, b"1_000", "\u0661".encode(), "\u00b2".encode(), b"9999999999999999999999"),
)
_ODD_VALUES: dict[type, tuple[object, ...]] = {
    int: (-(2**63), -(2**31) - 1, -2, -1, 0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    float: (0.0, -0.0, -1.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 1e-320),
    str: ("", "\0", "D", "P", "t-1", "\ud7ff", "x" * 300, "line\nbreak", "push", "pull", "completed"),
    bytes: (b"", b"\0", b"D/0/a", b"E/0/a", b"digest", b"x" * 300),
    bool: (True, False),
}
_ODD_OF_ANY_KIND = (None, True, 0, -1, 2**64 - 1, 0.5, "", b"", [], {}, [[]], {"type": "hello"})


def changed_text(text: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """The text with one change; `others` are texts that pieces are taken from."""
    at = draw.randrange(len(text) + 1)
    end = min(len(text), at + draw.choice((1, 1, 2, 4, 16, 256)))
    match draw.randrange(8):
        case 0:
            return text[:at] + text[end:]
        case 1:
            return text[:end] + text[at:end] * draw.choice((1, 2, 50)) + text[end:]
        case 2:
            return text[:at] + draw.choice(_ODD_TEXT) + text[at:]
        case 3:
            return text[:at] + bytes((draw.randrange(256),)) + text[end:]
        case 4 | 5 if numbers := list(_NUMBER.finditer(text)):
            number = draw.choice(numbers)
            return text[: number.start()] + draw.choice(_ODD_NUMBERS) + text[number.end() :]
        case 6:
            lines = text.split(b"\n")
            draw.shuffle(lines)
            return b"\n".join(lines)
        case _:
            other = draw.choice(others)
            start = draw.randrange(len(other) + 1)
            return text[:at] + other[start : start + draw.choice((4, 32, 512))] + text[end:]


def changed_value(value: object, draw: random.Random) -> object:
    """Some leaf or branch of the value is another one."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {each: kept for each, kept in value.items() if each != name}
        return value | {name: changed_value(value[name], draw)}
    if isinstance(value, list) and draw.random() < 0.9:
        if not value or draw.random() < 0.3:
            return [*value, *value[: draw.choice((1, 2, 40))], draw.choice(_ODD_OF_ANY_KIND[:4])]
        at = draw.randrange(len(value))
        if draw.random() < 0.2:
            return value[:at] + value[at + 1 :]
        return [*value[:at], changed_value(value[at], draw), *value[at + 1 :]]
    return draw.choice(_ODD_VALUES.get(type(value), _ODD_OF_ANY_KIND) if draw.random() < 0.9 else _ODD_OF_ANY_KIND)
