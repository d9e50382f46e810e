"""What a script is made of: its file, and what it imports from beside it."""

from pathlib import Path

from flatout.run.script import Script
from flatout.run.sources import MOST_FILES, files, hash_of, main_file


def laid(folder: Path, **contents: str) -> None:
    for name, text in contents.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_file_that_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    laid(tmp_path, package__train="x = 1")
    (tmp_path / "package" / "inner").mkdir()
    (tmp_path / "package" / "inner" / "__main__.py").write_text("x = 1")
    assert main_file(Script(module="package.train")) == Path("package/train.py")
    assert main_file(Script(module="package.inner")) == Path("package/inner/__main__.py")
    assert main_file(Script(path="package/inner")) == Path("package/inner/__main__.py")
    assert main_file(Script(path="package/train.py")) == Path("package/train.py")


def test_what_is_imported_from_beside_it_belongs_to_it(tmp_path):
    laid(
        tmp_path,
        train="import os, torch\nimport model.layers as layers\nfrom data import loader\n\ndef f():\n    import late",
        model__layers="from . import parts\nfrom .. import top\nfrom .deep.er import x",
        model__parts="from model import layers",
        model__deep__er="x = '\\d'",
        data__loader="this is no Python",
        late="import gone",
        top="",
        other="",
    )
    (tmp_path / "model" / "__init__.py").write_text("")
    found = [str(path.relative_to(tmp_path)) for path in files(Script(path=str(tmp_path / "train.py")))]
    assert found[0] == "train.py"
    assert sorted(found[1:]) == [
        "data/loader.py", "late.py", "model/__init__.py", "model/deep/er.py", "model/layers.py", "model/parts.py",
        "top.py",
    ]  # fmt: skip


def test_a_module_is_found_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    laid(tmp_path, package__train="from package import model\nfrom .losses import loss", package__model="", top="")
    laid(tmp_path, package__losses="import top")
    (tmp_path / "package" / "__init__.py").write_text("")
    found = {str(path) for path in files(Script(module="package.train"))}
    assert found == {"package/train.py", "package/__init__.py", "package/model.py", "package/losses.py", "top.py"}


def test_an_edit_of_any_of_them_changes_the_hash_and_others_do_not(tmp_path):
    laid(tmp_path, train="import model", model="x = 1", other="y = 1")
    script = Script(path=str(tmp_path / "train.py"))
    first = hash_of(script)
    laid(tmp_path, other="y = 2")
    assert hash_of(script) == first
    laid(tmp_path, model="x = 2")
    assert hash_of(script) != first
    laid(tmp_path, model="x = 1")
    assert hash_of(script) == first


def test_what_is_not_there_is_not_ours_to_say(tmp_path):
    assert len(hash_of(Script(path=str(tmp_path / "gone.py")))) == len(hash_of(Script(module="gone.train"))) == 16


def test_a_project_without_end_is_read_up_to_a_limit(tmp_path):
    laid(tmp_path, **{f"m{i}": f"import m{i + 1}" for i in range(MOST_FILES + 10)})
    assert len(files(Script(path=str(tmp_path / "m0.py")))) == MOST_FILES
