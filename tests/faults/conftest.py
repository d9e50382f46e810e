"""What the tests of faults share: a working folder of their own."""

import tempfile

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder, which is also where temporary files go."""
    place = tmp_path / "project"
    place.mkdir()
    monkeypatch.chdir(place)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place
