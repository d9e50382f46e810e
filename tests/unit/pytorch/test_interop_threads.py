"""Is `interop_threads` set before the script forks, kept from breaking it, and refused where nothing is forked?"""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers.interop_threads import TASKS, InteropThreads  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402
from tiers import some  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "forks.py"
FORKING = replace(FACTS, forks_work=True, num_interop_threads=2)

needs_tasks = pytest.mark.skipif(not os.path.isdir(TASKS), reason="the system does not tell of threads")


@functools.cache
def forks(*words):
    """PyTorch takes the number once, so each try has a process of its own."""
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- where it applies ----------------------------------------------------------------------------------------------


def test_a_script_that_forks_nothing_pays_for_no_processes():
    assert InteropThreads().applies(FACTS, MACHINE) == "nothing in the script forks work"


def test_it_applies_where_something_was_forked_on_more_than_one_thread():
    lever = InteropThreads()
    assert lever.applies(FORKING, MACHINE) is None
    assert "one thread" in lever.applies(replace(FORKING, num_interop_threads=1), MACHINE)


def test_the_present_number_is_not_tried():
    many = replace(MACHINE, num_cores=16)
    assert InteropThreads().settings(FORKING, many) == ({"num": 1}, {"num": 8}, {"num": 16})
    assert InteropThreads().settings(replace(FORKING, num_interop_threads=16), many) == ({"num": 1}, {"num": 8})


# -- what it does --------------------------------------------------------------------------------------------------


@needs_tasks
@pytest.mark.parametrize("num", some([1, 3], 3))
def test_the_number_is_what_forked_work_has_and_the_proof_comes_with_the_first_fork(num):
    said = forks(num)
    assert "without forks False {'interop_threads': 'no effect was seen'}" in said
    assert any(line.startswith("with forks True") for line in said)
    words = "1 thread" if num == 1 else f"{num} threads"
    assert f"evidence {{'interop_threads': 'forked work has {words}'}}" in said
    assert "own again builtin_function_or_method" in said


@needs_tasks
def test_the_facts_name_the_number_of_plain_and_not_ours():
    plain = next(line for line in forks(0) if line.startswith("in plain")).split()[2].rstrip(",")
    assert f"in plain {plain}, now 3" in forks(3)


def test_a_script_that_sets_its_own_number_goes_on_and_what_is_refused_is_refused_as_in_plain():
    """A number that is none, the script's own, and one more after it."""
    said = ["refused 0", "asked for 2", "refused 4"]
    assert forks(0, 0, 2, 4)[:3] == said
    under = forks(3, 0, 2, 4)
    assert under[:3] == said and "in plain 2, now 3" in under


def test_training_ends_where_it_ends_in_plain():
    assert forks(0)[-1] == forks(1)[-1] == forks(3)[-1]
