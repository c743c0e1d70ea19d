"""Records on disk."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvberth.bench import RecordError, RecordFile, RequestRecord, read_records, write_records


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


number = st.floats(allow_nan=False, allow_infinity=False)
records_of_any_kind = st.builds(
    RequestRecord,
    index=st.integers(0, 2**40),
    request_id=st.text(),
    planned_s=number,
    sent_s=number,
    late_ms=number,
    status=st.none() | st.integers(100, 599),
    error=st.none() | st.text(),
    cancelled=st.booleans(),
    follows=st.none() | st.integers(0, 9),
    prompt_tokens=st.integers(0, 2**40),
    output_tokens=st.integers(0, 2**40),
    ttft_ms=st.none() | number,
    tpot_ms=st.none() | number,
    e2e_ms=st.none() | number,
    itl_ms=st.lists(number),
    chunks=st.integers(0, 9),
    chunk_tokens=st.lists(st.integers(0, 9)),
    text_sha256=st.none() | st.text(),
    headers=st.dictionaries(st.text(), st.text()),
    kv_transfer_params=st.none() | st.dictionaries(st.text(), st.integers() | st.text() | st.none()),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(records_of_any_kind, max_size=4))
def test_round_trip_of_any_record(tmp_path, records):
    """To the last bit of every number."""
    path = tmp_path / "requests.jsonl"
    path.unlink(missing_ok=True)
    write_records(path, records)
    assert read_records(path) == records


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
