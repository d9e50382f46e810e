"""Is a checkpoint that is written in the background the one that plain writes, for everybody who asks for it?"""

import errno
import io
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.seams.background_saves import BackgroundSaves  # noqa: E402

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def saves(monkeypatch):
    """Saves in the background; `hold` keeps a write from ending until `go`."""
    made = BackgroundSaves()
    made.free = threading.Event()
    made.free.set()
    made.reached = threading.Event()
    sync = os.fsync

    def fsync(file):
        made.reached.set()
        assert made.free.wait(30)
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    made.hold, made.go = made.free.clear, made.free.set
    made.install()
    yield made
    made.go()
    made.remove()
    assert torch.serialization._open_zipfile_writer.__module__ == "torch.serialization"


def held(saves, value, path):
    """Save a value, and hold the write before it is in its place."""
    saves.hold()
    torch.save(value, path)
    assert saves.reached.wait(30)
    threading.Timer(0.2, saves.go).start()


def state():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    whole = torch.arange(10.0)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "views": [whole[:3], whole[5:]],
        "step": 3, "text": "ä", "empty": torch.empty(0), "integers": torch.arange(3), "module": model,
    }  # fmt: skip


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.pt", "best.model.pt", "without", ".hidden.pt", "ä.pt", "a.", "a b.pth.tar"])
@pytest.mark.parametrize("present", [False, True])
def test_the_file_is_byte_for_byte_that_of_plain(name, present, saves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = state()
    for folder in ("plain", "ours"):
        os.mkdir(folder)
        if present:
            Path(folder, name).write_bytes(b"former")
            os.chmod(Path(folder, name), 0o640)
    saves.remove()
    torch.save(value, Path("plain", name))
    saves.install()
    torch.save(value, Path("ours", name))
    saves.wait()
    plain, ours = Path("plain", name), Path("ours", name)
    assert ours.read_bytes() == plain.read_bytes()
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert os.listdir("ours") == [name]
    assert saves.num_written == (name not in (".hidden.pt", "ä.pt"))


def test_what_is_updated_later_is_saved_as_it_was(saves, tmp_path):
    weight, steps = torch.ones(1000), [1]
    held(saves, {"weight": weight, "steps": steps}, tmp_path / "a.pt")
    weight.mul_(3)
    steps.append(2)
    loaded = torch.load(tmp_path / "a.pt")
    assert torch.equal(loaded["weight"], torch.ones(1000)) and loaded["steps"] == [1]


def test_the_former_file_is_whole_until_the_new_one_is(saves, tmp_path):
    path = tmp_path / "a.pt"
    torch.save(1, path)
    saves.wait()
    former = path.read_bytes()
    saves.hold()
    torch.save(torch.ones(1000), path)
    assert saves.reached.wait(30)
    assert os.stat(path).st_size == len(former), "documented: a look at it does not wait"
    saves.go()
    assert torch.equal(torch.load(path), torch.ones(1000))


def test_a_link_still_leads_to_the_file_and_a_second_name_of_it_stays_one(saves, tmp_path):
    (tmp_path / "real.pt").write_bytes(b"former")
    (tmp_path / "last.pt").symlink_to("real.pt")
    torch.save(1, tmp_path / "last.pt")
    saves.wait()
    assert (tmp_path / "last.pt").is_symlink() and torch.load(tmp_path / "real.pt") == 1
    os.link(tmp_path / "real.pt", tmp_path / "second.pt")
    torch.save(2, tmp_path / "real.pt")
    assert torch.load(tmp_path / "second.pt") == 2 and saves.num_written == 1


def test_a_path_means_what_it_meant_when_it_was_saved(saves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    saves.hold()
    torch.save(1, "a.pt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    saves.go()
    saves.wait()
    assert torch.load(tmp_path / "a.pt") == 1 and os.listdir() == []


def test_files_that_are_open_buffers_and_the_older_format_are_written_as_plain(saves, tmp_path):
    buffer = io.BytesIO()
    torch.save(1, buffer)
    with open(tmp_path / "a.pt", "wb") as file:
        torch.save(2, file)
    torch.save(3, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    buffer.seek(0)
    assert [torch.load(f) for f in (buffer, tmp_path / "a.pt", tmp_path / "b.pt")] == [1, 2, 3]
    assert saves.num_written == 0


# -- who waits -----------------------------------------------------------------------------------------------------

READERS = {
    "torch.load": torch.load,
    "open": lambda path: torch.load(io.BytesIO(open(path, "rb").read())),  # noqa: SIM115
    "pathlib": lambda path: torch.load(io.BytesIO(path.read_bytes())),
    "os.open": lambda path: torch.load(os.fdopen(os.open(path, os.O_RDONLY), "rb")),
    "shutil.copy": lambda path: torch.load(shutil.copy(path, path.with_suffix(".copy"))),
    "os.replace": lambda path: os.replace(path, path.with_suffix(".new")) or torch.load(path.with_suffix(".new")),
    "os.link": lambda path: os.link(path, path.with_suffix(".new")) or torch.load(path.with_suffix(".new")),
    "a program": lambda path: torch.load(io.BytesIO(subprocess.run(["cat", path], capture_output=True).stdout)),
    "os.listdir": lambda path: torch.load(path.parent / os.listdir(path.parent)[0]),
    "glob": lambda path: torch.load(*path.parent.glob("*.pt")),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_asks_for_the_file_by_python_gets_the_new_one(reader, saves, tmp_path):
    held(saves, 7, tmp_path / "a.pt")
    assert READERS[reader](tmp_path / "a.pt") == 7


def test_the_next_save_waits_and_files_come_in_their_order(saves, tmp_path):
    held(saves, 1, tmp_path / "a.pt")
    for number in range(2, 6):
        torch.save(number, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == 5 and saves.num_written == 5


def test_other_files_are_opened_while_one_is_written(saves, tmp_path):
    (tmp_path / "other").write_text("x")
    saves.hold()
    torch.save(1, tmp_path / "a.pt")
    assert (tmp_path / "other").read_text() == "x", "the write is still held"
    saves.go()


def test_releasing_waits_so_that_a_plain_save_is_not_overtaken(saves, tmp_path):
    held(saves, 1, tmp_path / "a.pt")
    saves.remove()
    torch.save(2, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == 2


def test_threads_may_save_at_the_same_time(saves, tmp_path):
    def save(number):
        for turn in range(5):
            torch.save((number, turn), tmp_path / f"{number}.pt")

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.load(tmp_path / f"{n}.pt") for n in range(4)] == [(n, 4) for n in range(4)]
    assert saves.num_written == 20 and len(os.listdir(tmp_path)) == 4


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["missing/a.pt", "", "file/a.pt"])
def test_a_path_that_cannot_be_written_raises_at_once_what_plain_raises(where, saves, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(Exception) as ours:
        torch.save(1, str(tmp_path / where))
    saves.remove()
    with pytest.raises(type(ours.value)) as plain:
        torch.save(1, str(tmp_path / where))
    assert str(ours.value).split("\n")[0] == str(plain.value).split("\n")[0]
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_pickled_raises_and_leaves_the_former_file(saves, tmp_path):
    torch.save("former", tmp_path / "a.pt")
    with pytest.raises(AttributeError, match="pickle"):
        torch.save({"a": torch.ones(2), "b": lambda: 0}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == "former" and os.listdir(tmp_path) == ["a.pt"]


def test_a_write_that_fails_leaves_the_former_file_and_the_next_save_raises_why(saves, tmp_path, monkeypatch):
    """Whoever has waited for it before: our own recorder opens files as well, and what it catches nobody would see."""
    torch.save("former", tmp_path / "a.pt")
    saves.wait()

    def fsync(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fsync)
        torch.save(1, tmp_path / "a.pt")
        assert torch.load(tmp_path / "a.pt") == "former" and os.listdir(tmp_path) == ["a.pt"]
    with pytest.raises(OSError, match="No space left"):
        torch.save(2, tmp_path / "b.pt")
    torch.save(3, tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt") == 3 and saves.num_written == 2


def test_without_memory_for_a_copy_it_is_written_at_once(saves, tmp_path, monkeypatch):
    def clone(self):
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(torch.UntypedStorage, "clone", clone)
    torch.save(torch.ones(3), tmp_path / "a.pt")
    assert saves.num_written == 0 and saves._writer is None
    assert torch.equal(torch.load(tmp_path / "a.pt"), torch.ones(3))


# -- the end of a process ------------------------------------------------------------------------------------------


def end(how, folder):
    command = [sys.executable, SCRIPTS / "saves.py", how]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        *[("end", 0), ("raise", 1)],
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("exit", 3), ("thread", 0), ("handler", 0), ("fork", 0))
        ),
    ],
)
def test_every_way_out_of_a_process_leaves_the_file(how, code, tmp_path):
    done = end(how, tmp_path)
    assert done.returncode == code, done.stderr
    assert torch.equal(torch.load(tmp_path / "a.pt"), torch.ones(1000)) and "the end" in done.stdout
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_file_that_could_not_be_written_at_the_end_is_shown_and_the_process_fails(tmp_path):
    done = end("fail", tmp_path)
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr
    assert "the end" in done.stdout and "a handler" in done.stdout, "all other handlers have run"


def test_a_process_that_is_killed_keeps_the_former_file(tmp_path):
    done = end("kill", tmp_path)
    assert done.returncode == -15
    assert torch.load(tmp_path / "a.pt") == "former"


# -- the lever -----------------------------------------------------------------------------------------------------


def test_the_lever_goes_by_name_shows_its_effect_and_is_undone(watch, tmp_path):
    from flatout.frameworks.pytorch.levers import registry

    plain = torch.serialization._open_zipfile_writer
    watched, model = watch(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(num):
        for _ in range(num):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()

    train(8)
    for number in range(2):
        watched.pytorch.engage({"checkpoints": {}})
        if not number:
            assert watched.pytorch.evidence() == ({}, {"checkpoints": "no effect was seen"})
        torch.save(model.state_dict(), tmp_path / "a.pt")
        train(2)
        torch.load(tmp_path / "a.pt")
        assert watched.pytorch.evidence()[0]["checkpoints"].startswith(f"{number + 1} checkpoint")
        watched.pytorch.engage({})
        assert torch.serialization._open_zipfile_writer is plain
    lever = registry()["checkpoints"]
    assert lever.class_ == "exact" and lever.only_by_name
