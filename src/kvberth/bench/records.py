"""One record per request: the raw material of every figure, kept as one JSON line each."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvberth.bench.errors import RecordError

__all__ = ["RecordFile", "RequestRecord", "read_records", "write_records"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one request. Milliseconds count from its sending, seconds from the start of the measurement.

    Attributes:
        status: of the HTTP response; None if there was none.
        error: why the request failed; None if it succeeded. What stands before the first ": " is the kind of failure.
        prompt_tokens: as the server counts them, or else as planned.
        ttft_ms: until the first token's chunk.
        e2e_ms: until the last token's chunk; None for a failed request.
        tpot_ms: (e2e_ms - ttft_ms) / (output_tokens - 1); None for a failed request or a single token.
        itl_ms: the gaps between chunks; a server may put several tokens into one.
        text_sha256: of the answer's whole text, in hex; None for a failed request.
        headers: those of the response whose names begin with `x-kvberth`.
    """

    index: int
    request_id: str
    planned_s: float
    sent_s: float
    late_ms: float
    status: int | None = None
    error: str | None = None
    prompt_tokens: int
    output_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: list[float] = []
    text_sha256: str | None = None
    headers: dict[str, str] = {}
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def failure_kind(self) -> str | None:
        return None if self.error is None else self.error.partition(": ")[0]


class RecordFile:
    """A file of records that is written as requests end, so that a run which is stopped keeps what it has.

    Opening raises `FileExistsError` if the file is there: results are never overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb")

    def write(self, record: RequestRecord) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._file.close()


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write a new file of records; `FileExistsError` if there is one."""
    with RecordFile(path) as file:
        for record in records:
            file.write(record)


def read_records(path: Path) -> list[RequestRecord]:
    """Read a file of records. Raises `RecordError` for a row that is none, `OSError` for a file that is not there."""
    decoder = msgspec.json.Decoder(RequestRecord)
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                records.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise RecordError(f"{path}:{number}: {error}") from error
    return records
