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
        request_id: empty for a request that was not sent.
        status: of the HTTP response; None if there was none.
        error: why the request failed; None if it succeeded. What stands before the first ": " is the kind of failure.
        cancelled: its client went away before the answer had ended, as was planned: neither a success nor a failure.
        follows: the index of the request whose answer this one, a later turn of a conversation, had to wait for.
        planned_s: when it was due. A later turn is due when the answer before it has ended.
        prompt_tokens: as the server counts them, or else as planned; 0 for a chat if the server does not say.
        ttft_ms: until the first token's chunk.
        e2e_ms: until the last token's chunk; None for a failed or cancelled request.
        tpot_ms: (e2e_ms - ttft_ms) / (output_tokens - 1); None for a failed or cancelled request or a single token.
        itl_ms: the gaps between chunks; a server may put several tokens into one.
        chunks: how many there were; with fewer than `output_tokens`, `itl_ms` is not the time between tokens.
        chunk_tokens: the tokens in each of them, if the server sends their ids; else empty.
        text_sha256: of the answer's whole text, in hex; None for a failed or cancelled request.
        headers: those of the response whose names begin with `x-kvberth`.
    """

    index: int
    request_id: str
    planned_s: float
    sent_s: float
    late_ms: float
    status: int | None = None
    error: str | None = None
    cancelled: bool = False
    follows: int | None = None
    prompt_tokens: int
    output_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: list[float] = []
    chunks: int = 0
    chunk_tokens: list[int] = []
    text_sha256: str | None = None
    headers: dict[str, str] = {}
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def was_sent(self) -> bool:
        """False for a turn of a conversation that had failed before."""
        return bool(self.request_id)

    @property
    def has_succeeded(self) -> bool:
        return self.error is None and not self.cancelled

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
