"""What is on disk, and what survives."""

import msgspec
import pytest
from tests.compare.conftest import manifest, measured, record, settings

from kvberth.compare import Folder, FolderError


@pytest.fixture
def empty(tmp_path):
    opened = Folder(tmp_path / "new")
    opened.create(manifest(settings()))
    return opened


def test_a_cell_counts_once_it_is_whole(empty):
    """Before, its lines are on disk already, and in no figure."""
    file = empty.open_cell("r0-grid-push-16384@8")
    file.write(record(0))
    assert (empty.done(), empty.cut_short()) == (set(), {"r0-grid-push-16384@8": 1})
    file.finish(measured([100.0]))
    assert (empty.done(), empty.cut_short()) == ({"r0-grid-push-16384@8"}, {})
    (whole,) = empty.measured()
    assert whole == measured([100.0])


def test_another_attempt_replaces_what_was_cut_short(empty):
    """Its lines and the earlier ones are not mixed."""
    for attempt in range(2):
        file = empty.open_cell("key")
        file.write(record(attempt))
        file.abandon()
    assert empty.cut_short() == {"key": 1}


def test_a_full_disk_is_told_at_the_end_of_the_cell(empty):
    """Not from within the traffic, whose other requests go on; and the cell does not count."""
    file = empty.open_cell("key")

    class Full:
        def write(self, _data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    file._file.close()
    file._file = Full()
    file.write(record(0))
    with pytest.raises(FolderError, match=r"key\.jsonl cannot be written: No space left on device"):
        file.finish(measured([100.0]))
    assert empty.done() == set()


def test_results_are_never_overwritten(empty):
    """A second comparison in the same folder is refused, and told how to go on."""
    with pytest.raises(FolderError, match="has a comparison already; --resume goes on with it"):
        empty.create(manifest(settings()))


def test_resuming_needs_the_same_settings(empty):
    """The one that differs is named. A price changes no measurement."""
    assert empty.resume(settings(price_per_gpu_hour=3.0)).settings == settings()
    with pytest.raises(FolderError, match=r"was begun with rates 1\.0, 8\.0, not 1\.0"):
        empty.resume(settings(rates=(1.0,)))


def test_a_folder_without_a_comparison(tmp_path):
    """Said in one line, for `report` and for `--resume`."""
    with pytest.raises(FolderError, match="has no comparison in it"):
        Folder(tmp_path).manifest()


def test_a_broken_line_is_named(folder):
    """With its file and number."""
    path = next((folder.path / "raw").glob("*.jsonl"))
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(FolderError, match=f"{path.name}:5: "):
        folder.measured()


def test_a_broken_description_of_a_cell_is_named(folder):
    """Likewise."""
    path = next((folder.path / "raw").glob("*.json"))
    path.write_text("{}")
    with pytest.raises(FolderError, match=f"{path.name}: "):
        folder.measured()


def test_incidents_are_one_line_each(empty):
    """Whatever the log that they quote looks like."""
    empty.note("prefill-0 ended with status 1; the end of its log:\n    line 1\n    line 2")
    (incident,) = empty.incidents()
    assert incident.what == "prefill-0 ended with status 1; the end of its log: | line 1 | line 2"


def test_no_reader_sees_half_a_file(empty, monkeypatch):
    """A summary that cannot be written leaves the one that was there."""
    empty.write(empty.summary_path, b"whole")
    monkeypatch.setattr(
        "pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(FolderError, match="No space left"):
        empty.write(empty.summary_path, b"half")
    assert empty.summary_path.read_bytes() == b"whole"


def test_the_manifest_keeps_every_setting(empty):
    """What is read is what was written."""
    assert msgspec.structs.asdict(empty.manifest().settings) == msgspec.structs.asdict(settings())
