"""Two machines, as two network namespaces of this one, train what one process trains; other code is told apart."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest
import torch

from faulting import FLATOUT, REASON, SCRIPTS, environment, parts

PLACE = "10.98.7.1:29417"


def networks():
    """Why no namespaces can be made; None where they were."""
    if shutil.which("ip") is None:
        return "there is no `ip`"
    first, second = (f"flatout-{os.getpid()}-{letter}" for letter in "ab")
    commands = [f"netns add {first}", f"netns add {second}",
                f"link add fva{os.getpid()} type veth peer name fvb{os.getpid()}",
                f"link set fva{os.getpid()} netns {first}", f"link set fvb{os.getpid()} netns {second}",
                f"-n {first} addr add 10.98.7.1/24 dev fva{os.getpid()}",
                f"-n {second} addr add 10.98.7.2/24 dev fvb{os.getpid()}",
                f"-n {first} link set lo up", f"-n {second} link set lo up",
                f"-n {first} link set fva{os.getpid()} up", f"-n {second} link set fvb{os.getpid()} up"]  # fmt: skip
    for command in commands:
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"`ip {command}`: {done.stderr.strip()}"
    return None


@pytest.fixture(scope="module")
def machines():
    reason = REASON or networks()
    names = [f"flatout-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        if reason is not None:
            pytest.skip(f"two machines cannot be made here: {reason}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def on_both(machines, folders, *words):
    """The same command on both machines at once; how each ended."""
    start = f"run --ranks 2 --nnodes 2 --rdzv-endpoint {PLACE} --hang-timeout 20s --node-rank".split()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *FLATOUT, *start, str(number), *words],
            text=True,
            cwd=folder,
            env=environment(),
            **pipes,
        )
        for number, (name, folder) in enumerate(zip(machines, folders, strict=True))
    ]
    return [(*process.communicate(timeout=120), process.returncode) for process in running]


@pytest.fixture
def folders(tmp_path):
    found = [tmp_path / name for name in ("first", "second", "alone")]
    for folder in found:
        folder.mkdir()
        shutil.copy(SCRIPTS / "faulty_rank.py", folder / "train.py")
    return found


def test_two_machines_train_what_one_process_trains(machines, folders):
    first, second, alone = folders
    wanted = subprocess.run(
        [FLATOUT[0], "train.py", "none", "0"], capture_output=True, text=True, cwd=alone, check=True
    )
    (said, told, code), (other_said, other_told, other_code) = on_both(machines, folders[:2], "train.py", "none", "0")
    assert (code, other_code) == (0, 0), told + other_told
    assert (said, other_said) == (wanted.stdout, "")
    assert not (second / "trained.pt").exists()
    saved, kept = torch.load(first / "trained.pt"), torch.load(alone / "trained.pt")
    assert all(torch.allclose(saved[name], kept[name], rtol=1e-5) for name in kept)


def test_other_code_on_another_machine_is_told_apart(machines, folders):
    first, second, _ = folders
    with open(second / "train.py", "a") as script:
        script.write("# changed\n")
    (_, told, code), (_, other_told, other_code) = on_both(machines, (first, second), "train.py", "none", "0")
    assert code and other_code
    assert "rank 1 has another script than rank 0" in parts(other_told)["error"], told
    assert not (first / "trained.pt").exists()


def test_a_machine_that_nobody_meets_says_so(machines, folders):
    done = subprocess.run(
        ["ip", "netns", "exec", machines[1], *FLATOUT, "run", "--ranks", "2", "--nnodes", "2", "--node-rank", "1",
         "--rdzv-endpoint", PLACE, "--hang-timeout", "4s", "train.py", "none", "0"],
        capture_output=True, text=True, cwd=folders[1], env=environment(), timeout=120, check=False,
    )  # fmt: skip
    assert "did not meet" in parts(done.stderr)["error"], done.stderr
