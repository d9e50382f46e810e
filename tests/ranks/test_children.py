"""Processes that a script forks are no ranks: they compute by themselves with whole models, and never with parts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from faulting import FLATOUT, REASON, environment, left_behind, parts

from .on_ranks import on_ranks
from .scenarios import mlp, trained

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")

FORKS = """
import multiprocessing, os, torch
fork = multiprocessing.get_context("fork")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(16, 8)

def look(found):
    with torch.no_grad():
        found.put(round(model(batch).sum().item(), 3))
    optimizer.zero_grad()
    model(batch).square().mean().backward()  # on a copy of its own
    optimizer.step()
    found.put(round(model(batch).sum().item(), 3))

for epoch in range(3):
    for step in range(4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    found = fork.Queue()
    child = fork.Process(target=look, args=(found,))
    child.start()
    print(epoch, found.get(), found.get(), flush=True)
    child.join()
    print(child.exitcode, round(model(batch).sum().item(), 3), flush=True)
"""

HOGWILD = """
import multiprocessing, torch
fork = multiprocessing.get_context("fork")
model = torch.nn.Linear(8, 4)
model.share_memory()

def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(16, 8)).square().mean().backward()
        optimizer.step()

children = [fork.Process(target=train) for _ in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
"""


def ended(folder, text, *words, command=()):
    folder.mkdir()
    (folder / "forks.py").write_text(text)
    command = [*(command or [*FLATOUT, "run", "--quiet", "--ranks", "2", *words]), "forks.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment(), timeout=90, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    assert not left_behind(folder)
    return done


def test_a_forked_process_computes_with_whole_models_as_in_one_process(tmp_path):
    alone = ended(tmp_path / "alone", FORKS, command=[sys.executable])
    ranks = ended(tmp_path / "ranks", FORKS, "--mode", "replicate")
    assert (ranks.returncode, ranks.stdout) == (0, alone.stdout), ranks.stderr


def evaluates_in_a_child():
    model = mlp()
    found = trained(model)
    child = os.fork()
    if not child:
        with torch.no_grad():
            model(torch.ones(8, 8))
        os._exit(0)
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("mode", ["shard", "tensor", "pipeline"])
def test_a_forked_process_is_refused_where_models_are_divided(mode):
    for found in on_ranks(2, evaluates_in_a_child, mode):
        assert found["error"] == "a process that the script has started computes with a divided model"


def test_a_rank_that_waits_for_a_process_that_is_refused_ends_with_it(tmp_path):
    done = ended(tmp_path / "ranks", FORKS, "--mode", "shard")  # whose parent waits for the process's answer
    assert done.returncode == 3
    assert parts(done.stderr)["error"] == "a process that the script has started computes with a divided model"
    assert "`--mode replicate`" in parts(done.stderr)["hint"]


def test_a_script_that_trains_in_processes_alone_is_refused(tmp_path):
    done = ended(tmp_path / "ranks", HOGWILD)
    assert done.returncode == 3
    assert parts(done.stderr)["error"] == "a process that the script has started trains"
