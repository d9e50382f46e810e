"""The machine gives way: a full disk, a clock that is set, threads that die, no shared memory, no home, no rights."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from faulting import CEILINGS, FLATOUT, PYTHON, copied, environment, flatout, last_lines, left_behind, parts, plain
from flatout.errors import MachineError
from flatout.run import folder as run_folders

pytest.importorskip("torch")


def mounted(script, *, where, size):
    """A shell command with a small file system in a place, in a namespace of its own; the test is skipped where none
    can be had."""
    allowed = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", where], capture_output=True, check=False
    )
    if allowed.returncode:
        pytest.skip("mount namespaces are forbidden here")
    mount = f"mount -t tmpfs -o size={size} none {where}"
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && {script}"],
        capture_output=True, text=True, timeout=120, env=environment(XDG_CACHE_HOME=str(CEILINGS)), check=False,
    )  # fmt: skip


# -- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_disk_that_fills_up_in_a_run_costs_the_rest_of_the_record_alone(folder):
    (folder / "small").mkdir()
    script = copied("starved.py", folder)
    command = f"cp {script} small && cd small && {' '.join(FLATOUT)}"
    done = mounted(
        f"{command} run --levers threads=1 starved.py disk; echo ended $?; rm filler; {PYTHON} -m flatout report "
        f"starved-1 --export {folder}/steps.csv",
        where=folder / "small", size="2m",
    )  # fmt: skip
    loss, full, ended, *_ = done.stdout.splitlines()
    assert (full, ended) == ("full: No space left on device", "ended 0")
    assert "Traceback" not in done.stderr
    assert [loss] == plain("starved.py", "clock").stdout.splitlines()
    assert "steps in" in next(line for line in done.stderr.splitlines() if " steps" in line)
    assert len(Path("steps.csv").read_text().splitlines()) > 1, "what was written before it was full can be read"


def test_a_disk_that_fills_up_in_a_measurement_is_an_error_that_says_so(folder):
    (folder / "small").mkdir()
    script = copied("starved.py", folder)
    done = mounted(
        f"cp {script} small && cd small && {' '.join(FLATOUT)} why --allow-writes --budget 15s starved.py"
        " 'endless disk'",
        where=folder / "small", size="2m",
    )  # fmt: skip
    assert done.returncode == MachineError.exit_code, done.stderr
    found = parts(done.stderr)
    assert set(found) == {"error", "cause", "hint"} and found["cause"] == "the disk is full"
    assert "Traceback" not in done.stderr


@pytest.mark.smoke
def test_a_record_that_meets_a_full_disk_half_way_in_a_line_is_read_up_to_there(tmp_path, monkeypatch):
    from flatout.records.trace import Remark
    from flatout.records.trace_file import Follower, append

    path = tmp_path / "trace.jsonl"
    append(Remark(text="whole"), path)
    with open(path, "ab") as file:
        file.write(b'{"kind": "remark", "te')  # as far as it went
    assert [record.text for record in Follower(path).new()] == ["whole"]


# -- the clock -----------------------------------------------------------------------------------------------------

JUMPING = (
    "import random, sys, time; lots = random.Random(2); time.time = lambda: 1.8e9 + lots.uniform(-1e9, 1e9); "
    "from flatout.__main__ import main; sys.argv[0] = 'flatout'; main()"
)


def test_a_clock_that_is_set_to_and_fro_changes_no_duration(folder):
    copied("starved.py", folder)
    begun_s = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-c", JUMPING, "run", "--levers", "threads=1", "--json", "told.json", "starved.py", "clock"],
        env=environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    took_s = time.monotonic() - begun_s
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    told = json.loads(Path("told.json").read_text())
    assert 0 < told["steps_s"] < took_s
    records = [json.loads(line) for line in (Path(told["run"]) / "trace-run.jsonl").read_text().splitlines()]
    header = next(one for one in records if "started_unix_s" in one)
    assert 0 < header["start_s"] < took_s
    for one in records:
        assert all(0 <= step_s < took_s for step_s in one.get("step_s", ()))
        assert 0 <= one.get("took_s", 0) < took_s


@pytest.mark.smoke
def test_a_clock_that_jumps_ahead_removes_no_record_of_the_last_runs(tmp_path, monkeypatch):
    for number in range(run_folders.KEPT_RUNS):
        (tmp_path / f"train-{number + 1}").mkdir()
    monkeypatch.setattr(time, "time", lambda: 9e9)
    run_folders.prune(tmp_path, "train")
    assert len(list(tmp_path.iterdir())) == run_folders.KEPT_RUNS
    monkeypatch.setattr(time, "time", lambda: -9e9)
    (tmp_path / "train-99").mkdir()
    run_folders.prune(tmp_path, "train")
    assert len(list(tmp_path.iterdir())) == run_folders.KEPT_RUNS + 1


# -- threads of ours -----------------------------------------------------------------------------------------------


@pytest.fixture
def unheard(monkeypatch):
    """What threads that die would print on the script's terminal."""
    heard = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    return heard


def sampler(monkeypatch):
    from flatout.frameworks.pytorch.observe import stack_samples

    return stack_samples.StackSampler(threading.get_ident(), lambda: "forward", frozenset())


@pytest.mark.smoke
def test_a_sampler_of_stacks_that_dies_keeps_what_it_saw_and_says_nothing(monkeypatch, unheard):
    from flatout.frameworks.pytorch.observe import stack_samples

    interval_s, looks = sys.getswitchinterval(), []

    def taken(frame, whole=stack_samples._taken):
        looks.append(None)
        if len(looks) == 4:
            raise RuntimeError("planted")
        return whole(frame)

    monkeypatch.setattr(stack_samples, "_taken", taken)
    one = sampler(monkeypatch)
    one.start()
    deadline = time.monotonic() + 10
    while one._thread.is_alive() and time.monotonic() < deadline:
        sum(range(1000))
    found = one.stop()
    assert len(looks) == 4 and found.num_samples == 3
    assert unheard == [] and sys.getswitchinterval() == interval_s


@pytest.mark.smoke
def test_a_sampler_of_stacks_that_gets_no_thread_sees_nothing(monkeypatch, unheard):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    interval_s = sys.getswitchinterval()
    one = sampler(monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    one.start()
    found = one.stop()
    assert found.num_samples == 0 and sys.getswitchinterval() == interval_s


# -- shared memory -------------------------------------------------------------------------------------------------


def test_processes_that_a_lever_adds_where_shared_memory_is_too_small_do_not_end_the_run(folder):
    script = copied("starved.py", folder)
    done = mounted(f"{' '.join(FLATOUT)} run --levers ahead=2 {script.name} memory", where="/dev/shm", size="32m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(script.name, "memory").stdout
    assert "Traceback" not in done.stderr


# -- home and rights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["/proc", "/no/such/home", None], ids=["read-only", "not there", "not known"])
def test_a_run_needs_no_home(folder, home):
    copied("tiny.py", folder)
    done = flatout("run", "--levers", "threads=1", "tiny.py", HOME=home, XDG_CACHE_HOME=None)
    assert done.returncode == 0 and "steps" in last_lines(done)[-1], done.stderr
    assert "Traceback" not in done.stderr and "failed" not in done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize("refused", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_costs_measuring_again(tmp_path, monkeypatch, refused):
    from flatout.frameworks import kind
    from flatout.machine import calibrate

    def refuse(*_, **__):
        raise OSError(refused, os.strerror(refused))

    found = object()
    monkeypatch.setattr(calibrate, "measure", lambda *_, **__: found)
    monkeypatch.setattr(calibrate, "_cached", lambda path: None)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert calibrate.ceilings(kind().package) is found


FORBIDDEN = (
    "import os\n"
    "def refuse(*_):\n"
    "    raise PermissionError(1, 'Operation not permitted')\n"
    "os.sched_setaffinity = refuse\n"
)


@pytest.mark.smoke
def test_where_affinity_may_not_be_read_nothing_is_known_of_it(monkeypatch):
    from flatout.machine import foreign_cpu, read

    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_getaffinity", refuse)  # PyTorch itself ends where its optimizers are compiled
    assert read.allowed_cpus() == frozenset(range(os.cpu_count()))
    assert foreign_cpu.take() is None


def test_where_affinity_may_not_be_set_a_run_goes_on_under_its_levers(folder):
    copied("tiny.py", folder)
    own = folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(FORBIDDEN)
    path = os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")])
    done = flatout("run", "--levers", "threads=1", "tiny.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "60 steps" in last_lines(done)[-1], done.stderr
    assert left_behind(folder) == []
