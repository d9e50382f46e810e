"""What ranks exchange at most is measured, and nothing is left of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatout.errors import MachineError, UsageError
from flatout.frameworks import kind
from flatout.machine import exchange_ceilings as exchanging
from flatout.records.ceilings import Ceilings
from flatout.report import machine, print_view
from handmade import MACHINE

PROGRAM = kind().package.exchange_calibration


def test_two_ranks_tell_what_they_exchange(capsys):
    found = exchanging.exchange_ceilings(PROGRAM, 2)
    assert [(one.name, one.unit) for one in found] == [
        ("sum", "B/s"), ("gather", "B/s"), ("passing on", "B/s"), ("start of a sum", "s"),
    ]  # fmt: skip
    assert all(one.num_samples == 10 and "2 ranks" in one.source for one in found)
    left = subprocess.run(["pgrep", "-f", PROGRAM.name], capture_output=True, text=True, check=False).stdout
    assert not left, "processes are left"
    here = Ceilings(
        machine=MACHINE, framework="pytorch", framework_version="2.13.0", device="cpu", num_threads=2,
        measured_unix_s=1.8e9, measuring_s=10.0, foreign_cpu_fraction=0.0, values=(),
    )  # fmt: skip
    print_view(machine.view(here, exchanges=found), verbose=True)
    told = capsys.readouterr().out
    assert "exchanges" in told and "sums of 25 MiB" in told


def test_one_rank_has_nobody_to_exchange_with():
    with pytest.raises(UsageError) as told:
        exchanging.exchange_ceilings(PROGRAM, 1)
    assert told.value.hint == "e.g. `--ranks 2`"


def use_python_that(does, folder, monkeypatch):
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_what_ranks_say_when_they_fail_is_told(tmp_path, monkeypatch):
    use_python_that("echo no torch here >&2\nexit 1", tmp_path, monkeypatch)
    with pytest.raises(MachineError) as told:
        exchanging.exchange_ceilings(PROGRAM, 2)
    assert told.value.cause == "no torch here"


def test_ranks_that_say_nothing_are_ended(tmp_path, monkeypatch):
    use_python_that("sleep 1000", tmp_path, monkeypatch)
    with pytest.raises(MachineError) as told:
        exchanging.exchange_ceilings(PROGRAM, 2, limit_s=0.5)
    assert told.value.cause == "nothing came within 0.5 s"
