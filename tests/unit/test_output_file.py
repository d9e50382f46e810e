"""A file that the user names is written over only where flatout wrote it, and whole or not at all."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.cli import flatout, foreground
from flatout.judge import proof
from flatout.judge.result import save
from flatout.records import output_file
from proofs import proved, runs

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples

SCRIPT = "import torch\nprint('mine')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    place = tmp_path / ".flatout" / "a-1"
    place.mkdir(parents=True)
    save(replace(examples.lenet(), run=str(place), timeline=()), place)
    place = tmp_path / ".flatout" / "p-1"
    place.mkdir()
    proof.save(proved(runs(3)), place)
    return tmp_path


def complaint(capsys, *words, code=2):
    assert flatout.main(list(words), prog_name="flatout") == code
    out, err = capsys.readouterr()
    error, cause, hint = err.splitlines()
    assert (out, error[:7], cause[:7], hint[:7]) == ("", "error: ", "cause: ", "hint:  ")
    return error[7:], cause[7:], hint[7:]


SHOWN = ["a-1", "p-1"]


@pytest.mark.parametrize("shown", SHOWN)
def test_a_page_is_not_written_over_somebodys_work(capsys, shown):
    error, cause, hint = complaint(capsys, "report", shown, "--html", "train.py")
    assert error == "`--html train.py` would overwrite a file that is no page"
    assert (cause, hint) == ("only an earlier page of flatout is written over", "name another file")
    assert Path("train.py").read_text() == SCRIPT


@pytest.mark.parametrize("shown", SHOWN)
def test_an_earlier_page_of_any_kind_and_an_empty_file_are_written_over(capsys, shown):
    page = Path("page.html")
    page.write_text("")
    for former in SHOWN:
        flatout.main(["report", former, "--html", "page.html"])
        flatout.main(["report", shown, "--html", "page.html"])
        assert output_file.PAGE.mark in page.read_bytes()[: output_file.HEAD_BYTES]
    assert capsys.readouterr().err == ""


def test_somebody_elses_page_is_no_page_of_ours(capsys):
    Path("index.html").write_text("<!doctype html><html><head><title>mine</title></head></html>")
    assert "is no page" in complaint(capsys, "report", "a-1", "--html", "index.html")[0]


def test_a_file_that_cannot_be_read_is_not_written_over(capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output_file, "open", refuse, raising=False)
    error, cause, _ = complaint(capsys, "report", "a-1", "--html", "train.py")
    assert error.endswith("would overwrite a file that cannot be read") and cause == "Permission denied"


def test_a_folder_is_no_file_to_export_to(capsys):
    Path("steps.csv").mkdir()
    assert complaint(capsys, "report", "a-1", "--export", "steps.csv")[0] == "`--export steps.csv` is a folder"


@pytest.mark.parametrize("text", ['{"lr": 0.1}', "[1]", " ", '[{"exit_code": 0}]', '{"runs": [{"exit_code": 1}]}'])
def test_somebodys_own_json_is_no_summary(capsys, text):
    Path("config.json").write_text(text)
    error, cause, hint = complaint(capsys, "run", "--json", "config.json", "train.py")
    assert error == "`--json config.json` would overwrite a file that is no summary"
    assert "only an earlier summary" in cause and hint == "e.g. `flatout run --json run.json SCRIPT`"
    assert Path("config.json").read_text() == text


def test_a_summary_is_written_over_its_former_one_but_not_over_what_the_script_wrote_meanwhile(capsys, monkeypatch):
    monkeypatch.setattr(foreground, "run_summary", lambda ran: {"exit_code": ran})
    path = Path("run.json")
    foreground.write_summary(path, 0)
    foreground.write_summary(path, 1)
    assert path.read_text() == '{"exit_code": 1}\n' and capsys.readouterr().err == ""
    path.write_text('{"accuracy": 0.98}')
    foreground.write_summary(path, 2)
    assert path.read_text() == '{"accuracy": 0.98}' and "no summary: `--json run.json` would" in capsys.readouterr().err


def test_a_real_summary_begins_as_a_summary_is_known():
    source = Path(foreground.__file__).read_text()
    assert source.partition("def run_summary")[2].partition("return {")[2].strip().startswith('"exit_code":')


def test_a_link_stays_a_link_and_a_file_keeps_its_mode():
    Path("real.html").touch(mode=0o600)
    os.symlink("real.html", "link.html")
    output_file.write_whole(["a", "b"], Path("link.html"))
    assert Path("link.html").is_symlink() and Path("real.html").read_text() == "ab"
    assert Path("real.html").stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_written_to_and_stays(tmp_path):
    ours, theirs = os.pipe()
    try:
        output_file.check(Path(f"/dev/fd/{theirs}"), output_file.SUMMARY, option="--json")
        output_file.write_whole(["whole"], Path(f"/dev/fd/{theirs}"))
        assert os.read(ours, 10) == b"whole"
    finally:
        os.close(ours), os.close(theirs)


def test_what_fails_midway_leaves_the_former_file_and_no_draft(tmp_path):
    def pieces():
        yield "half"
        raise OSError(28, "No space left on device")

    names = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        output_file.write_whole(pieces(), Path("train.py"))
    assert Path("train.py").read_text() == SCRIPT and sorted(p.name for p in tmp_path.iterdir()) == names
