"""The lever of communication from the command line, on ranks and without: engaged, proven, left out with the reason."""

from __future__ import annotations

import pytest

from faulting import REASON, copied, flatout, left_behind, write_plan

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"ranks cannot be isolated here: {REASON}")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    copied("divides.py", tmp_path)
    return tmp_path


@pytest.mark.smoke
def test_a_lever_that_is_named_is_at_work_on_ranks_that_end_well(here):
    done = flatout("run", "--ranks", "2", "--levers", "bf16_gradients", "divides.py", "12")
    assert done.returncode == 0, done.stderr
    assert "not at work" not in done.stderr and "no effect" not in done.stderr
    assert done.stdout.splitlines()[-1].startswith("11 ") and not left_behind(here)


def test_where_there_is_nothing_to_do_that_is_said(here):
    done = flatout("run", "--ranks", "2", "--mode", "tensor", "--levers", "bf16_gradients", "divides.py", "12")
    assert done.returncode == 0 and "in mode `tensor` gradients are not summed so: bf16_gradients" in done.stderr
    done = flatout("run", "--levers", "bf16_gradients", "divides.py", "12")
    assert done.returncode == 0 and "it is for ranks (`--ranks N`)" in done.stderr


def test_a_plan_has_them_on_its_ranks_alone(here):
    write_plan("divides.py", "bf16_gradients", "ranks=2:replicate")
    done = flatout("run", "divides.py", "12")
    assert done.returncode == 0 and "2 ranks, replicate, as the plan says" in done.stderr
    assert "without bf16_gradients" not in done.stderr
    done = flatout("run", "--ranks", "1", "divides.py", "12")
    assert done.returncode == 0 and "; without bf16_gradients: one process sends no gradients" in done.stderr
    done = flatout("run", "--ranks", "2", "--accept", "rounding", "divides.py", "12")
    assert "levers of class precision, `--accept rounding` does not admit them" in done.stderr
