"""Traces in CSV, which have lengths and times but no prompts: Azure's and BurstGPT.

Columns are found by their names, so that releases with more of them are read too.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime

from kvberth.bench.traces.lines import Line
from kvberth.bench.traces.rows import MOST_SECONDS, MOST_TOKENS, BadRow, RandomTokens, TraceRow, Turn

__all__ = ["AZURE_COLUMNS", "BURSTGPT_COLUMNS", "cells", "read_azure", "read_burstgpt"]

# Azure/AzurePublicDataset: AzureLLMInferenceDataset2023.md and ...2024.md have the same names; the times of 2023 have
# seven digits of a second and no zone, those of 2024 six or none, and a zone.
AZURE_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")

# HPMLL/BurstGPT: later releases have "Session ID" and "Elapsed time" too.
BURSTGPT_COLUMNS = ("timestamp", "request tokens", "response tokens")


def read_azure(lines: Iterable[Line]) -> Iterator[TraceRow | BadRow]:
    """Rows of an Azure LLM inference trace."""

    def row(number: int, cell: Mapping[str, str]) -> TraceRow:
        if cell.get("numimages", "0") != "0":  # the multimodal traces of 2025
            raise ValueError(f"NumImages: {cell['numimages']!r}; images cannot be sent")
        turn = Turn(
            RandomTokens(_count("ContextTokens", cell["contexttokens"])),
            _count("GeneratedTokens", cell["generatedtokens"]),
        )
        return TraceRow(number, _date_seconds("TIMESTAMP", cell["timestamp"]), (turn,))

    return _rows(lines, row)


def read_burstgpt(lines: Iterable[Line]) -> Iterator[TraceRow | BadRow]:
    """Rows of a BurstGPT trace. Requests that had failed have no answer, and cannot be sent."""

    def row(number: int, cell: Mapping[str, str]) -> TraceRow:
        if cell["response tokens"] == "0":
            raise ValueError("Response tokens: 0, a request that had failed; files 'without_fails' have none")
        turn = Turn(
            RandomTokens(_count("Request tokens", cell["request tokens"])),
            _count("Response tokens", cell["response tokens"]),
        )
        return TraceRow(number, _seconds("Timestamp", cell["timestamp"]), (turn,))

    return _rows(lines, row)


def cells(text: bytes) -> list[str]:
    """The cells of one line. Raises `csv.Error` if it is none."""
    (line,) = csv.reader([text.decode(errors="replace").rstrip("\r\n")], strict=True)
    return [each.strip() for each in line]


def _rows(lines: Iterable[Line], row: Callable[[int, Mapping[str, str]], TraceRow]) -> Iterator[TraceRow | BadRow]:
    columns: list[str] | None = None
    for number, text in lines:
        try:
            line = cells(text)
            if columns is None:
                columns = [each.lower() for each in line]
                continue
            if len(line) == len(columns):
                yield row(number, dict(zip(columns, line, strict=True)))
            else:
                yield BadRow(number, f"{len(line)} cells where the header has {len(columns)}")
        except (csv.Error, ValueError, OverflowError) as error:
            yield BadRow(number, str(error))


def _count(name: str, cell: str) -> int:
    if not (cell.isascii() and cell.isdigit() and len(cell) <= 20 and 1 <= int(cell) <= MOST_TOKENS):
        raise ValueError(f"{name}: {_shown(cell)} is no number of tokens from 1 to {MOST_TOKENS}")
    return int(cell)


def _seconds(name: str, cell: str) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"{name}: {_shown(cell)} is no time in seconds")
    return seconds


def _date_seconds(name: str, cell: str) -> float:
    try:
        moment = datetime.fromisoformat(cell)
    except ValueError:
        raise ValueError(f"{name}: {_shown(cell)} is no time such as 2023-11-16 18:15:46.680590") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:37] + "...")
