"""Stores on the disk as a user sees them: listed, removed, moved, whatever else lies in their folder. No framework."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from flatout import api
from flatout.cli import flatout
from flatout.errors import MachineError, UsageError
from flatout.frameworks.pytorch.levers import registry
from flatout.records import store_folder, store_state
from flatout.records.store_state import BusyError, Lock, Part, State, TornError
from flatout.run.choice import Engagement

ITEMS = Part(name="items", dtype="int64", shape=(), row_bytes=8)
COLUMN = Part(name="column-0", dtype="float32", shape=(2,), row_bytes=8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "flatout" / "stores"


def kept(folder, name="train-mnist-3f2a", *, num_rows=10, days=0.0, marks=None, generation="0123abcd"):
    """A store by hand."""
    state = State(
        format=1, flatout="0.1.0", script="/home/you/train.py", dataset="MNIST", made_by="PyTorch 2", form=None,
        marks=marks or {"data": name}, generation=generation, parts=(ITEMS, COLUMN), num_items=10, capacity=10,
        num_rows=num_rows, chunk_rows=100, sums={"items": "00000000", "column-0": "00000000"}, made_unix_s=0.0,
    )  # fmt: skip
    path = folder / name
    path.mkdir(parents=True)
    for part in state.parts:
        state.file(path, part).write_bytes(bytes(10 * part.row_bytes))
    store_state.write(path, state)
    (path / "lock").touch()
    for one in path.iterdir():
        os.utime(one, (time.time() - days * 86400,) * 2)
    return path


def typed(capsys, *words, code=0):
    """What a command line prints: to stdout, to stderr."""
    assert (flatout.main(["store", *words], prog_name="flatout") or 0) == code
    return capsys.readouterr()


def error(capsys, *words, code=2):
    out, err = typed(capsys, *words, code=code)
    lines = err.splitlines()
    assert not out and [line.split(":")[0] for line in lines] == ["error", "cause", "hint"]
    return [line.partition(":")[2].strip() for line in lines]


# -- ls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_no_store_is_a_line(capsys, folder, there):
    if there:
        folder.mkdir(parents=True)
    assert typed(capsys, "ls").out == "no store is kept; `flatout run --keep-store SCRIPT` keeps items on the disk\n"
    assert typed(capsys, "ls", "--json").out == "{}\n"
    assert typed(capsys, "rm", "--all").out == "nothing was removed\n"


def test_stores_are_a_table_with_the_latest_first(capsys, folder):
    kept(folder, "old-mnist-0001", days=40, num_rows=4)
    kept(folder, "new-mnist-0002", days=2)
    with contextlib.closing(Held(kept(folder, "used-mnist-0003"))):
        lines = typed(capsys, "ls").out.splitlines()
    assert [" ".join(line.split()) for line in lines[:4]] == [
        "store items size last used state of",
        "used-mnist-0003 10 12 KiB just now whole, in use MNIST in train.py",
        "new-mnist-0002 10 12 KiB 2 days ago whole MNIST in train.py",
        "old-mnist-0001 4 of 10 12 KiB 40 days ago partial MNIST in train.py",
    ]
    assert lines[-2:] == ["together   3 stores, 36 KiB", "next       flatout store rm old-mnist-0001"]


class Held:
    """A run that uses a store."""

    def __init__(self, path):
        self._lock = Lock(path / "lock", alone=False)

    def close(self):
        self._lock.release()


def test_the_json_has_what_the_table_has(capsys, folder):
    kept(folder)
    (one,) = json.loads(typed(capsys, "ls", "--json").out).items()
    assert one[0] == "train-mnist-3f2a"
    assert list(one[1]) == [
        *("script", "dataset", "num_kept", "num_items", "size_bytes", "used_unix_s", "state", "in_use"),
    ]
    assert one[1]["state"] == "whole" and one[1]["num_kept"] == 10


def test_rubbish_in_the_folder_is_no_store(capsys, folder):
    kept(folder)
    (folder / "photographs").mkdir()
    (folder / "photographs" / "one.jpg").write_bytes(b"1")
    (folder / "a file").write_text("")
    (folder / "link").symlink_to(folder / "train-mnist-3f2a")
    (folder / "nowhere").symlink_to(folder / "not there")
    (folder / "empty").mkdir()
    assert list(json.loads(typed(capsys, "ls", "--json").out)) == ["train-mnist-3f2a"]
    assert error(capsys, "rm", "photographs")[0] == "no such store: `photographs`"
    assert error(capsys, "rm", "link")[0] == "no such store: `link`"
    typed(capsys, "rm", "--all")
    assert sorted(one.name for one in folder.iterdir()) == ["a file", "empty", "link", "nowhere", "photographs"]


@pytest.mark.parametrize(
    ("harm", "state"),
    [
        (lambda path: (path / "state.json").unlink(), "torn"),
        (lambda path: (path / "state.json").write_text("{"), "torn"),
        (lambda path: (path / "state.json").write_bytes(b"\xff\xfe"), "torn"),
        (lambda path: (path / "0123abcd-column-0").unlink(), "torn: rows are missing"),
        (lambda path: os.truncate(path / "0123abcd-items", 3), "torn: rows are missing"),
        (lambda path: other_version(path), "of another version of flatout"),
        (lambda path: ((path / "state.json").unlink(), (path / "state.json").mkdir()), "unreadable: Is a directory"),
    ],
)
def test_a_store_that_is_not_whole_is_listed_as_that_and_can_be_removed(capsys, folder, harm, state):
    path = kept(folder)
    harm(path)
    (one,) = json.loads(typed(capsys, "ls", "--json").out).values()
    assert one["state"] == state
    typed(capsys, "ls")
    if "unreadable" not in state:
        assert "removed train-mnist-3f2a" in typed(capsys, "rm", path.name).out and not path.exists()


def other_version(path):
    state = json.loads((path / "state.json").read_text())["state"] | {"format": 2}
    (path / "state.json").write_text(json.dumps({"state": state, "checksum": store_state._checksum(state)}))


def test_names_of_scripts_cannot_move_the_cursor(capsys, folder):
    path = kept(folder)
    store_state.write(path, dataclasses.replace(store_state.read(path), script="/x/\x1b[31m.py", dataset="\nD"))
    assert "\x1b[31m" not in typed(capsys, "ls").out


# -- rm -------------------------------------------------------------------------------------------------------------


def test_stores_are_removed_by_name(capsys, folder):
    for name in ("a-x-0001", "b-x-0002", "c-x-0003"):
        kept(folder, name)
    assert typed(capsys, "rm", "a-x-0001", "c-x-0003", "a-x-0001").out == "removed a-x-0001, c-x-0003: 24 KiB freed\n"
    assert [path.name for path in folder.iterdir()] == ["b-x-0002"]


def test_an_unknown_name_removes_nothing(capsys, folder):
    kept(folder)
    said = error(capsys, "rm", "train-mnist-3f2a", "train-mnist-3f2b")
    assert said == [
        "no such store: `train-mnist-3f2b`", "stores are `train-mnist-3f2a`", "did you mean `train-mnist-3f2a`?",
    ]  # fmt: skip
    assert len(store_folder.paths(folder)) == 1
    assert error(capsys, "rm", "../stores/train-mnist-3f2a")[0].startswith("no such store")
    assert error(capsys, "rm", str(folder / "train-mnist-3f2a"))[0].startswith("no such store")


@pytest.mark.parametrize(
    "words", [(), ("x", "--all"), ("x", "--older-than", "3"), ("--older-than", "3"), ("--all", "--older-than", "x")]
)
def test_what_is_to_be_removed_has_to_be_said_once(capsys, folder, words):
    kept(folder)
    error(capsys, "rm", *words)
    assert len(store_folder.paths(folder)) == 1


def test_old_stores_are_removed(capsys, folder):
    kept(folder, "a-x-0001", days=3.1)
    kept(folder, "b-x-0002", days=2.9)
    assert "removed a-x-0001:" in typed(capsys, "rm", "--all", "--older-than", "3").out
    assert typed(capsys, "rm", "--all", "--older-than", "3").out == "nothing was removed\n"
    assert [path.name for path in folder.iterdir()] == ["b-x-0002"]


def test_a_store_in_use_stays_and_that_is_said(capsys, folder):
    path = kept(folder)
    kept(folder, "b-x-0002")
    with contextlib.closing(Held(path)):
        out = typed(capsys, "rm", "--all").out
        assert out.splitlines() == ["removed b-x-0002: 12 KiB freed", "train-mnist-3f2a stays: a run uses it"]
        done = json.loads(typed(capsys, "rm", "--all", "--json").out)
    assert done == {"names": [], "freed_bytes": 0, "in_use": ["train-mnist-3f2a"], "others": []}
    assert store_folder.listed(folder)[0].state == "whole"


def test_files_that_are_none_of_ours_stay(capsys, folder):
    path = kept(folder)
    (path / "notes.txt").write_text("mine")
    (path / "0123abcd-items.bak").write_text("mine")
    assert "the folder of train-mnist-3f2a stays: other files lie in it" in typed(capsys, "rm", "--all").out
    assert sorted(one.name for one in path.iterdir()) == ["0123abcd-items.bak", "notes.txt"]
    assert typed(capsys, "ls").out.startswith("no store is kept")


def test_what_cannot_be_removed_is_an_error(capsys, folder, monkeypatch):
    path = kept(folder)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "unlink", refuse)
    said = error(capsys, "rm", "--all", code=MachineError.exit_code)
    assert said[:2] == [f"cannot remove `{path}`", "Permission denied"]


# -- options of run and tune ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "tune", "exec"])
@pytest.mark.parametrize("size", ["lots", "-1", "4 GB of it", "", "1e9", "iB", "4iB", "nan", "1.5.2", "4PB"])
def test_a_size_that_is_none_is_refused(capsys, command, size):
    assert flatout.main([command, f"--store-memory={size}", "--", "train.py"], prog_name="flatout") == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0] == f"error: `--store-memory {size}` is no size" and err[2] == "hint:  e.g. `--store-memory 4GB`"


NOTHING = "has nothing to do here: the lever sample_store is not engaged"


@pytest.mark.parametrize(
    ("engaged", "request_", "said", "folders"),
    [
        ({"sample_store": {}}, {"keep_store": True}, [], 1),
        ({"sample_store": {}}, {"store_memory_bytes": 5}, [], 0),
        ({}, {"keep_store": True}, [f"`--keep-store` {NOTHING}"], 0),
        ({"bf16": {}}, {"store_memory_bytes": 0}, [f"`--store-memory` {NOTHING}"], 0),
        ({"bf16": {}}, {}, [], 0),
    ],
)
def test_options_without_the_lever_are_said_to_do_nothing(engaged, request_, said, folders, folder):
    lines = []
    found = api._store_folders(api.RunRequest(**request_), Engagement(levers=engaged), lines.append)
    assert lines == said and found == (str(folder),) * folders
    assert store_folder.LEVER in registry()


# -- without a framework --------------------------------------------------------------------------------------------


def test_stores_are_listed_and_removed_where_no_framework_is_installed(folder):
    kept(folder)
    code = "import sys\nsys.modules.update(torch=None, numpy=None)\nfrom flatout.__main__ import main\nsys.exit(main())"
    for words, said in [(["ls"], "train-mnist-3f2a"), (["rm", "--all"], "removed"), (["ls"], "no store is kept")]:
        done = subprocess.run(
            [sys.executable, "-c", code, "store", *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 and said in done.stdout, done.stderr


# -- locks and states -----------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was_and_any_changed_byte_is_seen(folder):
    path = kept(folder)
    state = store_state.read(path)
    assert state.parts == (ITEMS, COLUMN)
    raw = (path / "state.json").read_bytes()
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1
        (path / "state.json").write_bytes(changed)
        with pytest.raises(TornError):
            store_state.read(path)
    (path / "state.json").write_bytes(raw)
    assert store_state.read(path) == state


def test_a_lock_is_held_by_many_or_by_one(folder):
    path = kept(folder) / "lock"
    one, other = Lock(path, alone=False), Lock(path, alone=False)
    with pytest.raises(BusyError):
        Lock(path, alone=True)
    assert store_state.is_held(path)
    one.release(), other.release(), other.release()
    assert not store_state.is_held(path)
    alone = Lock(path, alone=True)
    for again in (True, False):
        with pytest.raises(BusyError):
            Lock(path, alone=again)
    alone.release()


def test_a_lock_that_is_held_for_a_moment_is_waited_for(folder):
    path = kept(folder) / "lock"
    held = Lock(path, alone=True)
    threading.Timer(0.005, held.release).start()
    Lock(path, alone=False).release()


def test_a_lock_on_a_file_that_was_made_anew_is_one_on_the_new_file(folder, monkeypatch):
    path = kept(folder) / "lock"
    opened = store_state._opened

    def removed_meanwhile(one, *, touch=True):
        monkeypatch.setattr(store_state, "_opened", opened)
        descriptor = opened(one, touch=touch)
        path.unlink()
        return descriptor

    monkeypatch.setattr(store_state, "_opened", removed_meanwhile)
    lock = Lock(path, alone=True)
    assert store_state.is_held(path)
    lock.release()


def test_a_lock_whose_descriptor_a_script_has_closed_is_lost_and_closes_nothing_else(folder, tmp_path):
    lock = Lock(kept(folder) / "lock", alone=True)
    os.close(lock._descriptor)
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    assert mine == lock._descriptor
    assert not lock.holds()
    lock.release()
    os.fstat(mine)
    os.close(mine)


# -- what trials have kept ------------------------------------------------------------------------------------------


def test_stores_of_trials_move_to_the_cache(folder, tmp_path):
    kept(tmp_path / "run", "a-x-0001")
    kept(tmp_path / "run", "b-x-0002", num_rows=0)
    kept(tmp_path / "run", "c-x-0003", num_rows=5, marks={"data": "same"})
    kept(tmp_path / "run", "d-x-0004", marks={"data": "new"}, generation="99999999")
    kept(tmp_path / "run", "e-x-0005", marks={"data": "newer"})
    kept(folder, "other-name-0003", marks={"data": "same"})
    kept(folder, "d-x-0004", marks={"data": "old"})
    with contextlib.closing(Held(kept(folder, "e-x-0005"))):
        assert store_folder.adopted(tmp_path / "run", folder) == [
            "store `a-x-0001` is kept for later runs: 10 of 10 items",
            "store `d-x-0004` is kept for later runs: 10 of 10 items",
            "store `e-x-0005` is not kept: a run uses the store in its place",
        ]
    assert [one.name for one in store_folder.paths(folder)] == ["a-x-0001", "d-x-0004", "e-x-0005", "other-name-0003"]
    assert store_state.read(folder / "d-x-0004").generation == "99999999"
    assert {one.state for one in store_folder.listed(folder)} == {"whole"}


@pytest.mark.parametrize("room", [True, False])
def test_stores_of_trials_move_to_another_disk(folder, tmp_path, monkeypatch, room):
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is one disk only")
    place = store_folder.Path(f"/dev/shm/flatout-test-{os.getpid()}")
    monkeypatch.setattr(store_folder, "free_bytes", lambda _: 10**9 if room else 10)
    try:
        kept(place, "a-x-0001")
        said = store_folder.adopted(place, folder)
        if room:
            assert said == ["store `a-x-0001` is kept for later runs: 10 of 10 items"]
            assert [one.state for one in store_folder.listed(folder)] == ["whole"]
        else:
            assert said == ["store `a-x-0001` is not kept: the disk has no room"] and not store_folder.listed(folder)
        assert len(list(folder.iterdir())) == room
    finally:
        store_folder.shutil.rmtree(place)


def test_a_cache_that_may_not_be_written_keeps_nothing_of_trials(folder, tmp_path):
    kept(tmp_path / "run", "a-x-0001")
    (tmp_path / "file").write_text("")
    assert store_folder.adopted(tmp_path / "run", tmp_path / "file" / "stores") == [
        "store `a-x-0001` is not kept: Not a directory"
    ]
    assert store_folder.adopted(tmp_path / "not there", folder) == []


def test_without_a_home_there_are_no_stores(monkeypatch):
    def nowhere():
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(store_folder.Path, "home", nowhere)
    assert store_folder.stores_folder() is None and store_folder.stores() == []
    assert store_folder.remove_stores(None) == store_folder.Removed()
    with pytest.raises(UsageError):
        store_folder.remove_stores(["x"])
