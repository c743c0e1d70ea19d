"""The loaders of recorded traffic: what cannot be sent is refused with the file and the line, and that is all."""

import io
import random
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.mutation import changed_text

from kvberth.bench.errors import TraceError
from kvberth.bench.traces import Trace, read_trace

__all__ = ["changed", "run", "seeds"]

_NAME = "trace"
_EXAMPLES = Path(__file__).parents[1] / "bench" / "traces"


class _File:
    """A path whose file is in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self._data)

    def __str__(self) -> str:
        return _NAME


def run(data: bytes) -> None:
    """Read a file."""
    strict, lenient = _read(data, skip_bad_rows=False), _read(data, skip_bad_rows=True)
    if strict is not None:
        assert lenient is not None
        assert (strict.rows, strict.skipped) == (lenient.rows, ())
    for trace in (strict, lenient):
        if trace is not None:
            assert 1 <= sum(len(row.turns) for row in trace.rows) <= 50
            assert all(1 <= row.line <= data.count(b"\n") + 1 for row in (*trace.rows, *trace.skipped))


def changed(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    return changed_text(data, others, draw)


def seeds() -> list[bytes]:
    """The examples of the loaders' own tests."""
    return [path.read_bytes() for path in sorted(_EXAMPLES.iterdir()) if path.suffix != ".md"]


def _read(data: bytes, *, skip_bad_rows: bool) -> Trace | None:
    try:
        return read_trace(_File(data), requests=50, turns=3, skip_bad_rows=skip_bad_rows)  # type: ignore[arg-type]
    except TraceError as error:
        assert str(error).startswith(f"{_NAME}:"), error
        assert "\n" not in str(error), error
        return None
