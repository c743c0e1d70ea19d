"""The folder of a comparison: what is in it, and what survives an end that nobody wanted.

```
DIR/compare.json          settings, machine, versions; written first
DIR/raw/KEY.jsonl         one line per request of a cell that was measured to its end
DIR/raw/KEY.json          what belongs to it: the cell, the mode, what the engines counted
DIR/raw/KEY.partial       the lines of a cell that was cut short; not in any figure
DIR/incidents.jsonl       what went wrong, and when
DIR/summary.json, DIR/report.html     made from the above, at any time
```
A cell counts once `KEY.jsonl` is there, which appears whole and last.
"""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvberth.bench import RecordError, RequestRecord, read_records
from kvberth.compare.errors import FolderError
from kvberth.compare.plan import Cell
from kvberth.compare.settings import CompareSettings

__all__ = ["CellFile", "Folder", "Incident", "Manifest", "MeasuredCell"]

MANIFEST, SUMMARY, REPORT, INCIDENTS, RAW = "compare.json", "summary.json", "report.html", "incidents.jsonl", "raw"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures come from."""

    settings: CompareSettings
    started: str
    machine: dict[str, Any]
    versions: dict[str, str | None]


class MeasuredCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of one mode in one repetition.

    Attributes:
        counters: what the engines counted meanwhile; empty for attached deployments.
        idle_share: of all the machine's cores, from 0 to 1.
        num_engines: of the deployment; 0 if not known.
        handoffs_ms: from the end of the prefill to the first token, as the router heard of both, by request id.
    """

    cell: Cell
    mode: str
    repetition: int
    started: str
    counters: dict[str, float] = {}
    idle_share: float | None = None
    warnings: list[str] = []
    num_engines: int = 0
    handoffs_ms: dict[str, float] = {}
    records: tuple[RequestRecord, ...] = ()


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something that cost measurements."""

    time: str
    what: str


class CellFile:
    """The records of a cell that is being measured. One line each, written as requests end; see `finish`.

    A record that cannot be written raises nothing, since it comes from within the traffic: `finish` does.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / f"{key}.jsonl"
        self._partial = folder / f"{key}.partial"
        self._about = folder / f"{key}.json"
        self._problem: OSError | None = None
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise _cannot_write(self._partial, error) from error

    def write(self, record: RequestRecord) -> None:
        """Keep one record, on disk."""
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            self._problem = error

    def finish(self, measured: MeasuredCell) -> None:
        """The cell is whole; from now on it counts.

        Raises:
            FolderError: something could not be written.
        """
        try:
            if self._problem is not None:
                raise self._problem
            self._file.close()
            self._about.write_bytes(_as_json(msgspec.structs.replace(measured, records=())))
            self._partial.rename(self._path)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def abandon(self) -> None:
        """The cell was cut short: its lines stay, as a file that does not count."""
        try:
            self._file.close()
        except OSError as error:  # what could not be flushed is lost, and the disk has said so before
            self._problem = error


class Folder:
    """One comparison on disk. Owned by one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def summary_path(self) -> Path:
        return self.path / SUMMARY

    @property
    def report_path(self) -> Path:
        return self.path / REPORT

    @property
    def log_path(self) -> Path:
        """Where engines log."""
        return self.path / "logs"

    def create(self, manifest: Manifest) -> None:
        """Begin a comparison. Raises `FolderError` if there is one already, or the folder cannot be written."""
        if (self.path / MANIFEST).exists():
            raise FolderError(f"{self.path} has a comparison already; --resume goes on with it")
        try:
            (self.path / RAW).mkdir(parents=True, exist_ok=True)
            (self.path / MANIFEST).write_bytes(_as_json(manifest))
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def resume(self, settings: CompareSettings) -> Manifest:
        """Go on with a comparison that has these settings.

        Raises:
            FolderError: there is none, or it has others.
        """
        manifest = self.manifest()
        for name, (there, here) in manifest.settings.differences(settings).items():
            raise FolderError(f"{self.path} was begun with {name} {_plain(there)}, not {_plain(here)}")
        return manifest

    def manifest(self) -> Manifest:
        """What the comparison was begun with. Raises `FolderError` if there is none."""
        path = self.path / MANIFEST
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError as error:
            raise FolderError(f"{self.path} has no comparison in it: there is no {MANIFEST}") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise FolderError(f"{path}: {error}") from error

    def open_cell(self, key: str) -> CellFile:
        """The file for a cell's records. What an earlier attempt has left is replaced."""
        return CellFile(self.path / RAW, key)

    def done(self) -> set[str]:
        """The keys of the cells that count."""
        return {path.stem for path in (self.path / RAW).glob("*.jsonl")}

    def has_cells(self) -> bool:
        """Whether there is anything to report on."""
        return bool(self.done())

    def cut_short(self) -> dict[str, int]:
        """The requests on disk of each cell that does not count, by its key."""
        paths = (path for path in (self.path / RAW).glob("*.partial"))
        return {path.stem: path.read_bytes().count(b"\n") for path in paths}

    def measured(self) -> list[MeasuredCell]:
        """All cells that count, with their records. Raises `FolderError` for one that cannot be read."""
        cells = []
        for key in sorted(self.done()):
            about = self.path / RAW / f"{key}.json"
            try:
                cell = msgspec.json.decode(about.read_bytes(), type=MeasuredCell)
                records = tuple(sorted(read_records(self.path / RAW / f"{key}.jsonl"), key=lambda each: each.index))
            except RecordError as error:
                raise FolderError(str(error)) from error
            except (OSError, msgspec.MsgspecError) as error:
                raise FolderError(f"{about}: {error}") from error
            cells.append(msgspec.structs.replace(cell, records=records))
        return cells

    def note(self, what: str) -> None:
        """Keep an incident. A full disk is one that this cannot keep, and it is told elsewhere."""
        incident = Incident(time=now(), what=re.sub(r"\s*\n\s*", " | ", what.strip()))
        try:
            with (self.path / INCIDENTS).open("ab") as file:
                file.write(msgspec.json.encode(incident) + b"\n")
        except OSError:
            return

    def incidents(self) -> list[Incident]:
        """In order."""
        path = self.path / INCIDENTS
        if not path.exists():
            return []
        decoder = msgspec.json.Decoder(Incident)
        return [decoder.decode(line) for line in path.read_bytes().splitlines()]

    def write(self, path: Path, content: bytes) -> None:
        """Replace a file at once, so that no reader sees half of it. Raises `FolderError`."""
        beside = path.with_name(f".{path.name}.new")
        try:
            beside.write_bytes(content)
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise _cannot_write(path, error) from error


def now() -> str:
    """In UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _as_json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _plain(value: Any) -> str:
    return ", ".join(f"{each}" for each in value) if isinstance(value, tuple) else f"{value}"


def _cannot_write(path: Path, error: OSError) -> FolderError:
    return FolderError(f"{path} cannot be written: {error.strerror or error}")
