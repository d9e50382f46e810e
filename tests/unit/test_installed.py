"""The version that is found without importing is the one that the framework itself says."""

import subprocess
import sys
from pathlib import Path

import pytest

from flatout.errors import MachineError
from flatout.frameworks import kind
from flatout.machine.installed import Package, version_of

MADE_UP = Package(framework="madeup", name="madeup", calibration=Path("/nowhere"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `madeup`, with the metadata of a wheel."""
    folder = tmp_path / "madeup"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it was imported')")
    info = tmp_path / "madeup-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: madeup\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder


def test_it_is_what_torch_says():
    torch = pytest.importorskip("torch")
    assert version_of(kind().package) == torch.__version__


def test_the_package_itself_is_asked_before_its_metadata(package):
    (package / "version.py").write_text("from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    assert version_of(MADE_UP) == "2.13.0+cu130"


@pytest.mark.parametrize("text", [None, "__version__ = made()", "not Python (", "\0"])
def test_where_the_package_does_not_say_its_metadata_does(package, text):
    if text is not None:
        (package / "version.py").write_text(text)
    assert version_of(MADE_UP) == "2.13.0"


def test_a_package_without_either_is_there_all_the_same(package):
    (package.parent / "madeup-2.13.0.dist-info" / "METADATA").unlink()
    (package.parent / "madeup-2.13.0.dist-info").rmdir()
    assert version_of(MADE_UP) == "unknown"


def test_what_is_not_there_is_an_error_with_the_interpreter_that_was_asked(tmp_path):
    with pytest.raises(MachineError, match="not installed") as caught:
        version_of(Package(framework="absent", name="no_such_package_at_all", calibration=tmp_path))
    assert sys.executable in caught.value.cause


def test_finding_it_does_not_import_it():
    code = "from flatout.frameworks import kind\nfrom flatout.machine.installed import version_of\n"
    code += "version_of(kind().package)"
    code += "\nimport sys\nprint('torch' in sys.modules)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "False"
