"""Records on disk."""

import pytest

from kvberth.bench import RecordError, RecordFile, read_records, write_records


def test_round_trip(record, tmp_path):
    """What is written is read, failed requests and all."""
    records = [
        record(0, headers={"x-kvberth-path": "push"}, kv_transfer_params={"a": [1]}, text_sha256="0" * 64),
        record(1, error="HTTP 500: ü\nno", status=500),
    ]
    path = tmp_path / "requests.jsonl"
    write_records(path, records)
    assert read_records(path) == records
    assert path.read_bytes().count(b"\n") == 2


def test_a_bad_row_is_named(record, tmp_path):
    """File and line, and what is wrong."""
    path = tmp_path / "requests.jsonl"
    write_records(path, [record(0)])
    with path.open("ab") as file:
        file.write(b'{"index": "two"}\n')
    with pytest.raises(RecordError, match=r"requests\.jsonl:2: Expected `int`, got `str` - at `\$\.index`"):
        read_records(path)


def test_a_row_that_was_cut_is_named(record, tmp_path):
    """As a full disk leaves it."""
    path = tmp_path / "requests.jsonl"
    write_records(path, [record(0), record(1)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"requests\.jsonl:2: "):
        read_records(path)


def test_results_are_never_overwritten(record, tmp_path):
    """A second run needs another file."""
    write_records(tmp_path / "r", [record(0)])
    with pytest.raises(FileExistsError):
        RecordFile(tmp_path / "r")


def test_records_are_on_disk_when_written(record, tmp_path):
    """A run that is stopped keeps what it has."""
    with RecordFile(tmp_path / "r") as file:
        file.write(record(3))
        assert read_records(tmp_path / "r") == [record(3)]


def test_kind_of_failure(record):
    """What stands before the first colon."""
    assert record(0, error="HTTP 500: a: b").failure_kind == "HTTP 500"
    assert record(0).failure_kind is None
