"""Every run has a folder of its own, or a good reason for having none."""

import errno
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatout.errors import MachineError, RecordError, UsageError
from flatout.run import folder


def test_folders_are_numbered_and_git_ignores_them(tmp_path):
    first, second = folder.new(tmp_path, "train"), folder.new(tmp_path, "train")
    assert (first.name, second.name) == ("train-1", "train-2")
    assert (tmp_path / ".flatout" / ".gitignore").read_text() == "*\n"


def test_names_that_begin_alike_or_look_like_patterns_are_kept_apart(tmp_path):
    for stem in ("train", "train-3", "train[1]", "*", "train-²"):
        assert folder.new(tmp_path, stem).name == f"{stem}-1"
        assert folder.new(tmp_path, stem).name == f"{stem}-2"


def test_two_processes_never_get_the_same_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: folder.new(tmp_path, "train"), range(40)))
    assert len(set(made)) == 40


def test_a_place_where_nothing_can_be_made_is_an_error_in_three_parts(tmp_path):
    (tmp_path / ".flatout").write_text("in the way")
    with pytest.raises(MachineError, match=r"cannot write `.*\.flatout`"):
        folder.new(tmp_path, "train")


def test_only_one_measures_in_a_working_folder(tmp_path):
    with folder.claimed(tmp_path, "train"), pytest.raises(UsageError, match=rf"process {os.getpid()}"):
        folder.claimed(tmp_path, "other").__enter__()
    with folder.claimed(tmp_path, "train") as again:
        assert again.name == "train-2"


def test_a_working_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(MachineError, match="the working folder is gone"):
        folder.working_folder()


def test_a_full_disk_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(MachineError, match="the disk is full"), folder.claimed(tmp_path, "train"):
        pass
    assert sorted(p.name for p in (tmp_path / ".flatout").iterdir()) == [".gitignore", "lock"]


def test_the_claim_of_a_killed_process_does_not_stay(tmp_path):
    code = (
        "import os; from pathlib import Path; from flatout.run import folder\n"
        f"folder.claimed(Path({str(tmp_path)!r}), 'train').__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    with folder.claimed(tmp_path, "train") as place:
        assert place.name == "train-2"


@pytest.mark.parametrize("call", ["open", "ftruncate", "write"])
def test_a_disk_too_full_for_the_lock_is_said_in_three_parts_and_leaves_it_free(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder.root(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(MachineError, match=r"cannot write `.*lock`") as caught:
            folder.claimed(tmp_path, "train").__enter__()
    assert (caught.value.cause, caught.value.hint) == ("the disk is full", "free some space")
    with folder.claimed(tmp_path, "train") as place:
        assert place.name == "train-1"


def test_a_run_gets_a_folder_that_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with folder.for_run("train") as (place, problem):
        assert problem is None
        assert list(place.iterdir()) == []
    assert place.is_dir()


def test_a_run_in_a_folder_that_cannot_be_written_gets_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / ".flatout").write_text("in the way")
    with folder.for_run("train") as (place, problem):
        assert "cannot write" in problem.error
        assert place.parent == tmp_path and place.is_dir()
    assert not place.exists()


def test_a_run_gets_no_folder_where_nothing_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with folder.for_run("train") as (place, problem):
        assert place is None
        assert problem.cause == "the disk is full"
    assert [p.name for p in (tmp_path / ".flatout").iterdir()] == [".gitignore"]


def test_a_run_in_a_folder_that_is_gone_goes_on(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with folder.for_run("train") as (place, problem):
        assert problem is not None
        assert place.is_dir()
    monkeypatch.chdir(tmp_path)


def test_an_error_within_a_run_passes_and_the_temporary_folder_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".flatout").write_text("in the way")
    places = []
    with pytest.raises(KeyboardInterrupt), folder.for_run("train") as (place, _):
        places.append(place)
        raise KeyboardInterrupt
    assert not places[0].exists()


def test_the_newest_result_is_found_and_others_by_name_or_path(tmp_path):
    with pytest.raises(RecordError, match="nothing was measured in this folder yet"):
        folder.find(tmp_path, None)
    folder.new(tmp_path, "other")
    with pytest.raises(RecordError, match="not measured to the end"):
        folder.find(tmp_path, None)
    old, new, unfinished = (folder.new(tmp_path, "train") for _ in range(3))
    for place, when_s in ((old, 100), (new, 200)):
        (place / "result.json").write_text("{}")
        os.utime(place / "result.json", (when_s, when_s))
    assert folder.find(tmp_path, None) == new
    assert folder.find(tmp_path, "train-1") == old
    assert folder.find(tmp_path, str(new)) == new
    assert folder.find(tmp_path, str(new / "result.json")) == new
    assert folder.find(tmp_path, unfinished.name) == unfinished
    with pytest.raises(UsageError, match="no such run"):
        folder.find(tmp_path, "train-9")


def test_old_records_of_runs_go_and_what_was_found_stays(tmp_path):
    place = folder.root(tmp_path)
    for number in range(1, 41):
        made = folder.new(tmp_path, "train")
        (made / "trace-run.jsonl").write_text("")
        if number <= 3:
            (made / "result.json").write_text("{}")
        if number <= 30:
            for path in (made / "trace-run.jsonl", made):
                os.utime(path, (0, 0))
    folder.new(tmp_path, "train-other")
    folder.prune(place, "train")
    left = {p.name for p in place.iterdir() if p.is_dir()}
    assert left == {f"train-{n}" for n in (1, 2, 3, *range(21, 41))} | {"train-other-1"}


def test_records_of_today_stay_however_many(tmp_path):
    for _ in range(40):
        folder.new(tmp_path, "train")
    folder.prune(folder.root(tmp_path), "train")
    assert len(list(tmp_path.glob(".flatout/train-*"))) == 40


def _killed(place, name):
    """A folder as a measurement leaves it that was killed while a trial was at work."""
    scratch = place / ".flatout" / name / "scratch-1"
    (scratch / "layers" / "0" / "upper").mkdir(parents=True)
    (scratch / "layers" / "0" / "upper" / "checkpoint.pt").write_bytes(bytes(1000))
    (scratch / "spec.json").write_text("{}")
    (scratch.parent / "session-1.json").write_text("{}")
    return scratch.parent


def test_what_a_killed_measurement_left_is_removed_by_the_next_one(tmp_path):
    killed = _killed(tmp_path, "train-1")
    with folder.claimed(tmp_path, "other"):
        assert not killed.exists()


def test_finished_runs_of_a_killed_proof_are_kept_without_what_its_last_run_wrote(tmp_path):
    killed = _killed(tmp_path, "train-1")
    (killed / "runs.jsonl").write_text("")
    with folder.claimed(tmp_path, "train", killed):
        assert sorted(path.name for path in killed.iterdir()) == ["runs.jsonl", "session-1.json"]


def test_a_folder_of_the_users_that_is_called_like_ours_is_left_alone(tmp_path):
    (tmp_path / ".flatout" / "mine" / "scratch-1").mkdir(parents=True)
    (tmp_path / ".flatout" / "mine" / "scratch-1" / "notes.txt").write_text("mine")
    with folder.claimed(tmp_path, "train"):
        assert (tmp_path / ".flatout" / "mine" / "scratch-1" / "notes.txt").read_text() == "mine"
