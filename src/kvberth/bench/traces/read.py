"""Tells the formats of traces apart, by what the file says and not by its name, and reads what is wanted of one."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvberth.bench.errors import TraceError
from kvberth.bench.traces.lines import UNREADABLE, Line, read_custom, read_mooncake
from kvberth.bench.traces.rows import BadRow, Trace, TraceRow
from kvberth.bench.traces.sharegpt import entries_of_array, read_sharegpt
from kvberth.bench.traces.tables import AZURE_COLUMNS, BURSTGPT_COLUMNS, cells, read_azure, read_burstgpt

__all__ = ["FORMATS", "read_trace"]

FORMATS = {
    "azure": "CSV with TIMESTAMP, ContextTokens, GeneratedTokens",
    "burstgpt": "CSV with Timestamp, Request tokens, Response tokens",
    "mooncake": "JSON lines with timestamp, input_length, output_length, hash_ids",
    "sharegpt": "a JSON array, or JSON lines, with conversations",
    "custom": "JSON lines with prompt, prompt_tokens or prompt_token_ids",
}

_TIME_UNITS = {"azure": "dates", "burstgpt": "seconds", "mooncake": "milliseconds", "custom": "seconds"}


def read_trace(path: Path, *, requests: int, turns: int = 1, skip_bad_rows: bool = False) -> Trace:
    """Read rows from the beginning of the file until they make so many requests; all of it if it has fewer.

    Args:
        turns: the most requests of one conversation.
        skip_bad_rows: leave out what cannot be sent, rather than refuse the file.

    Raises:
        TraceError: the file cannot be read, is empty or of no known format, or has a row that cannot be sent.
        ValueError: one line that names the setting and what would be right.
    """
    for name, value in (("requests", requests), ("turns", turns)):
        if value < 1:
            raise ValueError(f"{name}: must be 1 or more, not {value}")
    try:
        with path.open("rb") as file:
            lines = ((number, text) for number, text in enumerate(file, start=1) if text.strip())
            found = _tell(path, lines)
            return _take(path, found, requests, turns, skip_bad_rows)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


class _Found(NamedTuple):
    format: str
    rows: Iterator[TraceRow | BadRow]


def _tell(path: Path, lines: Iterator[Line]) -> _Found:
    """The format, by the first line that is not blank."""
    number, first = next(lines, (1, b""))
    first = first.removeprefix(b"\xef\xbb\xbf")  # some programs begin a file of UTF-8 with this mark
    if not first.strip():
        raise TraceError(f"{path}: the file is empty")
    all_lines = chain([(number, first)], lines)
    if first.lstrip().startswith(b"["):
        data = b"\n" * (number - 1) + b"".join(text for _, text in all_lines)
        return _Found("sharegpt", read_sharegpt(entries_of_array(data, path)))
    if first.lstrip().startswith(b"{"):
        return _tell_json(path, number, first, all_lines)
    try:
        columns = {each.lower() for each in cells(first)}
    except (csv.Error, ValueError):
        columns = set()
    if columns.issuperset(AZURE_COLUMNS):
        return _Found("azure", read_azure(all_lines))
    if columns.issuperset(BURSTGPT_COLUMNS):
        return _Found("burstgpt", read_burstgpt(all_lines))
    raise _unknown(path, number)


def _tell_json(path: Path, number: int, first: bytes, lines: Iterator[Line]) -> _Found:
    try:
        fields = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).keys()
    except UNREADABLE as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    if "conversations" in fields:
        return _Found("sharegpt", read_sharegpt(lines))
    if "input_length" in fields:
        return _Found("mooncake", read_mooncake(lines))
    if fields & {"prompt", "prompt_tokens", "prompt_token_ids"}:
        return _Found("custom", read_custom(lines))
    raise _unknown(path, number)


def _unknown(path: Path, number: int) -> TraceError:
    known = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    return TraceError(f"{path}:{number}: the beginning of no known format ({known})")


def _take(path: Path, found: _Found, requests: int, turns: int, skip_bad_rows: bool) -> Trace:
    good: list[TraceRow] = []
    bad: list[BadRow] = []
    missing = requests
    for row in found.rows:
        if isinstance(row, BadRow):
            bad.append(row)
            missing -= not skip_bad_rows  # what is refused anyway is read no further than it would have been
        else:
            kept = row.turns[: min(turns, missing)]
            good.append(TraceRow(row.line, row.seconds, kept))
            missing -= len(kept)
        if missing <= 0:
            break
    if bad and not skip_bad_rows:
        others = f", and {len(bad) - 1} more of the {len(good) + len(bad)} rows read are bad" if len(bad) > 1 else ""
        raise TraceError(f"{path}:{bad[0].line}: {bad[0].reason}{others}; skip_bad_rows leaves such rows out")
    if not good:
        reason = f"; of {len(bad)} bad ones the first is line {bad[0].line}: {bad[0].reason}" if bad else ""
        raise TraceError(f"{path}: the file has no rows that can be sent{reason}")
    _check_times(path, good)
    has_times = good[0].seconds is not None
    return Trace(path, found.format, tuple(good), tuple(bad), _TIME_UNITS[found.format] if has_times else None)


def _check_times(path: Path, rows: list[TraceRow]) -> None:
    first = rows[0]
    for row in rows:
        if (row.seconds is None) != (first.seconds is None):
            some, none = (first, row) if row.seconds is None else (row, first)
            raise TraceError(f"{path}:{none.line}: no timestamp, though line {some.line} has one: all must, or none")
