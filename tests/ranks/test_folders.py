"""Folders that a script makes while it trains are made on all ranks, whichever comes first, and are there once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from faulting import FLATOUT, REASON, environment
from flatout.child import rank_folders

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
def ranks(tmp_path, monkeypatch):
    """`os.mkdir` of the first rank and of another."""
    plain, both = os.mkdir, []
    for prepare in (rank_folders.note, rank_folders.take_for_done):
        monkeypatch.setattr(os, "mkdir", plain)
        prepare(str(tmp_path / "made"))
        both.append(os.mkdir)
    monkeypatch.setattr(os, "mkdir", plain)
    return both


@pytest.mark.smoke
def test_a_folder_that_the_first_rank_has_made_is_made_once_more(tmp_path, ranks):
    first, other = ranks
    first(tmp_path / "a")
    other(tmp_path / "a")
    for mkdir in ranks:
        with pytest.raises(FileExistsError):
            mkdir(tmp_path / "a")
    os.rmdir(tmp_path / "a")
    first(str(tmp_path / "a"))
    other(os.fsencode(tmp_path / "a"))


@pytest.mark.smoke
def test_a_folder_of_the_users_is_in_the_way_on_all_ranks(tmp_path, ranks):
    os.mkdir(tmp_path / "theirs")
    for mkdir in ranks:
        with pytest.raises(FileExistsError):
            mkdir(tmp_path / "theirs")
        with pytest.raises(FileNotFoundError):
            mkdir(tmp_path / "nowhere" / "a")
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(FileExistsError):
            mkdir("theirs", dir_fd=folder)
        os.close(folder)
