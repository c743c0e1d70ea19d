"""The file through which a drill asks for faults."""

import pytest

from kvberth.emulator.faults import FaultFile


def test_what_one_sets_the_other_sees(tmp_path):
    """Two mappings of one file, as of a drill and an engine; without faults at first."""
    ours = FaultFile.create(tmp_path / "faults")
    theirs = FaultFile(tmp_path / "faults")
    assert not theirs.strikes("post")
    ours.set(post=1.0)
    assert theirs.strikes("post")
    assert not theirs.strikes("transfer")
    assert ours.hits() == theirs.hits() == 1


def test_share_is_about_what_was_set(tmp_path):
    """Of many transfers."""
    faults = FaultFile.create(tmp_path / "faults")
    faults.set(transfer=0.3)
    assert 200 < sum(faults.strikes("transfer") for _ in range(1000)) < 400


def test_a_file_is_not_taken_over(tmp_path):
    """Another run's engines may still look at it."""
    FaultFile.create(tmp_path / "faults")
    with pytest.raises(FileExistsError):
        FaultFile.create(tmp_path / "faults")
