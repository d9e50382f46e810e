"""Folders that a script makes while it trains are made on all ranks, whichever comes first, and are there once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from faulting import FLATOUT, REASON, environment
from flatout.child import rank_io

MAKES = """
import os, pathlib, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
is_first = "output-rank" not in os.readlink("/proc/self/fd/1")
os.mkdir("runs")
for epoch in range(4):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(16, 8)).square().mean().backward()
        optimizer.step()
    time.sleep(0.3 if is_first == bool(epoch % 2) else 0)  # now the one comes first, now the other
    pathlib.Path(f"runs/epoch-{epoch}").mkdir()
    torch.save(model.state_dict(), f"runs/epoch-{epoch}/model.pt")
    number = 0
    while True:  # the first that is free
        try:
            os.makedirs(f"runs/version-{number}")
            break
        except FileExistsError:
            number += 1
    print(epoch, number, sorted(os.listdir("runs")) if is_first else "")
"""


@pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")
def test_folders_of_each_epoch_are_made_once(tmp_path):
    said = []
    for name, command in (("alone", [sys.executable]), ("ranks", [*FLATOUT, "run", "--quiet", "--ranks", "2"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "makes.py").write_text(MAKES)
        done = subprocess.run(
            [*command, "makes.py"], capture_output=True, text=True, cwd=tmp_path / name, env=environment(), timeout=90,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(
            (done.stdout, sorted(str(p.relative_to(tmp_path / name)) for p in tmp_path.glob(f"{name}/runs/**/*")))
        )
    assert said[0] == said[1]


@pytest.fixture
def other(monkeypatch, tmp_path):
    """`os.mkdir` and `os.rmdir` of a rank above 0."""
    monkeypatch.setattr(os, "mkdir", os.mkdir)
    monkeypatch.setattr(os, "rmdir", os.rmdir)
    (tmp_path / "ranks.json").touch()
    rank_io.share_folders(str(tmp_path))
    return os.mkdir, os.rmdir


def _made_long_ago(path):
    """Its time is that of a folder of the user's."""
    was = os.stat
    return lambda name, *words, **named: (
        os.stat_result([*was(name)[:7], 0, 0, 0]) if name == str(path) else was(name, *words, **named)
    )


@pytest.mark.smoke
def test_a_folder_that_the_first_rank_has_made_is_made_once_more(tmp_path, other):
    mkdir, rmdir = other
    subprocess.run(["mkdir", tmp_path / "a"], check=True)
    mkdir(tmp_path / "a")
    with pytest.raises(FileExistsError):
        mkdir(tmp_path / "a")
    rmdir(tmp_path / "a")
    subprocess.run(["mkdir", tmp_path / "a"], check=True)
    mkdir(os.fsencode(tmp_path / "a"))


@pytest.mark.smoke
def test_a_folder_of_the_users_is_in_the_way_on_all_ranks(tmp_path, other, monkeypatch):
    mkdir, _ = other
    subprocess.run(["mkdir", tmp_path / "theirs"], check=True)
    monkeypatch.setattr(os, "stat", _made_long_ago(tmp_path / "theirs"))
    with pytest.raises(FileExistsError):
        mkdir(tmp_path / "theirs")
    with pytest.raises(FileNotFoundError):
        mkdir(tmp_path / "nowhere" / "a")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        mkdir(tmp_path / "file")
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(FileExistsError):
        mkdir("theirs", dir_fd=folder)
    os.close(folder)
