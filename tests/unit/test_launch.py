"""A child is started with what it must know, listened to, and ended with all that it started."""

import json
import os
import signal
import sys
import time

import pytest

from flatout.child.orders import SessionSpec
from flatout.errors import MachineError
from flatout.records.as_json import from_json
from flatout.records.trace import Failure, Ready
from flatout.run import child_process, process_tree
from flatout.run.child_process import BOOTSTRAP, Child, Ended, Launch, environment_for, session_files, write_session

CHILD = """
import json, os, signal, subprocess, sys, time
session = json.load(open(os.environ.pop("FLATOUT_SESSION")))
def say(**record):
    with open(session["trace"], "a") as file:
        file.write(json.dumps(record) + "\\n")
"""
READY = 'say(kind="ready", order=-1, num_steps=3)\n'
ANSWERS = READY + (
    "for line in open(session['orders']):\n"
    "    order = json.loads(line)\n"
    "    say(kind='toggle', engaged={}, released=[], took_s=0.0, step=1, order=order['number'])\n"
    "    say(kind='ready', order=order['number'], num_steps=4)\n"
)


@pytest.fixture
def launched(tmp_path):
    """Describes a child that runs the given lines without the bootstrap."""

    def build(code, **settings):
        session = SessionSpec(mode="trial", **session_files(tmp_path, "1"))
        command = (sys.executable, "-S", "-c", CHILD + code)
        return Launch(command=command, session=session, run_folder=tmp_path, name="1", **settings)

    return build


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"


def test_the_environment_reaches_the_bootstrap_and_can_be_restored(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_PYTHONPATH", "left over")
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    found = environment_for(tmp_path / "s.json", {"OMP_NUM_THREADS": "2"})
    assert found["PYTHONPATH"] == f"{BOOTSTRAP}:/a:/b"
    assert (found["FLATOUT_PYTHONPATH"], found["OMP_NUM_THREADS"]) == ("/a:/b", "2")
    assert found["FLATOUT_SESSION"] == str(tmp_path / "s.json")
    assert "FLATOUT_PYTHONPATH" in found and "HOME" not in environment_for(tmp_path, {"HOME": None})
    monkeypatch.setenv("PYTHONPATH", "")
    assert environment_for(tmp_path, {})["FLATOUT_PYTHONPATH"] == ""
    monkeypatch.delenv("PYTHONPATH")
    found = environment_for(tmp_path, {})
    assert (found["PYTHONPATH"], "FLATOUT_PYTHONPATH" in found) == (str(BOOTSTRAP), False)
    assert (BOOTSTRAP / "sitecustomize.py").is_file()


def test_the_session_is_written_for_the_child(launched):
    here = launched("")
    written = json.loads(write_session(here).read_text())
    assert from_json(SessionSpec, written, where="session") == here.session


def test_orders_are_answered_in_order_and_records_come_as_they_are_written(launched):
    with Child(launched(ANSWERS)) as child:
        assert [r.num_steps for r in child.ready(20.0)] == [3]
        for number in range(3):
            toggle, answer = child.ask(20.0, kind="census")
            assert (toggle.order, answer.order) == (number, number)
        assert len(child.records) == 7
        assert child.alive
    assert not child.alive


def test_whoever_waits_is_told(launched):
    calls = []
    with Child(launched("time.sleep(0.1)\n" + READY)) as child:
        child.ready(20.0, lambda: calls.append(1))
    assert calls


@pytest.mark.parametrize(
    ("code", "sentence", "finished"),
    [
        ("print('the end')", "ended with exit code 0", True),
        ("sys.exit(3)", "ended with exit code 3", False),
        ("os.kill(os.getpid(), 11)", "killed by SIGSEGV", False),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", "killed by signal 37", False),
        (
            'say(kind="failure", stage="script", error="ValueError", message="a\\nb")\nsys.exit(1)',
            "ValueError: a",
            False,
        ),
        ('say(kind="failure", stage="script", error="ValueError", message="")\nsys.exit(1)', "ValueError", False),
    ],
)
def test_a_child_that_ends_by_itself_says_how(launched, code, sentence, finished):
    with Child(launched(code)) as child, pytest.raises(Ended) as ended:
        child.ready(20.0)
    assert ended.value.sentence() == sentence
    assert (ended.value.finished, ended.value.hung) == (finished, False)
    if finished:
        assert ended.value.output == "the end\n"


def test_a_child_that_ends_between_two_orders_is_noticed(launched):
    with Child(launched(READY + 'say(kind="end", num_steps=9, wall_s=1.0)')) as child:
        child.ready(20.0)
        while child.alive:
            time.sleep(0.01)
        with pytest.raises(Ended) as ended:
            child.ask(20.0, kind="census")
    assert ended.value.num_steps == 9


def test_a_child_that_does_not_answer_is_given_up(launched):
    with Child(launched(READY + "time.sleep(60)")) as child:
        child.ready(20.0)
        with pytest.raises(Ended) as ended:
            child.ask(0.1, kind="census")
    assert ended.value.hung
    assert ended.value.sentence().startswith("hung")
    assert (ended.value.num_steps, child.alive) == (3, False)


def test_between_two_passes_a_child_has_a_limit_of_its_own(launched):
    code = READY + 'open(session["orders"]).readline()\nsay(kind="pass_end", num_steps=5)\ntime.sleep(1)\n'
    with Child(launched(code + 'say(kind="ready", order=0, num_steps=6)\ntime.sleep(60)')) as child:
        child.ready(20.0)
        assert child.ask(0.2, None, 20.0, kind="census")[-1].num_steps == 6
    with Child(launched(code)) as child:
        child.ready(20.0)
        with pytest.raises(Ended) as ended:
            child.ask(0.2, kind="census")
    assert ended.value.sentence() == "no step in time after a pass over the data"


def test_what_the_child_wrote_last_is_not_missed(launched):
    failure = 'say(kind="failure", stage="script", error="ValueError", message="last")\nos._exit(1)'
    for _ in range(5):
        with Child(launched(failure)) as child, pytest.raises(Ended) as ended:
            child.ready(20.0)
        assert ended.value.failure == Failure(stage="script", error="ValueError", message="last")
        (child.output_path.parent / "trace-1.jsonl").unlink()


def test_ending_a_child_ends_all_that_it_started_whatever_they_ignore(launched, tmp_path):
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "own = subprocess.Popen(['sleep', '60'])\n"
        "group = subprocess.Popen(['sleep', '60'], process_group=0)\n"
        "open('pids', 'w').write(f'{os.getpid()} {own.pid} {group.pid}')\n" + READY + "time.sleep(60)"
    )
    with Child(launched(code, folder=tmp_path)) as child:
        child.ready(20.0)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert all(map(alive, pids))
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))
    child.end()  # again does nothing


def test_a_program_that_the_child_gave_a_session_of_its_own_ends_with_it(launched, tmp_path):
    code = (
        "own = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "open('pids', 'w').write(str(own.pid))\n" + READY + "time.sleep(60)"
    )
    with Child(launched(code, folder=tmp_path)) as child:
        child.ready(20.0)
        pid = int((tmp_path / "pids").read_text())
        assert alive(pid)
    assert not alive(pid)


def test_an_exception_inside_ends_the_child_as_well(launched):
    with pytest.raises(KeyboardInterrupt), Child(launched(READY + "time.sleep(60)")) as child:
        child.ready(20.0)
        raise KeyboardInterrupt
    assert not child.alive


def test_a_run_folder_that_is_gone_is_an_error_in_three_parts(launched, tmp_path):
    here = launched("")
    gone = Launch(command=here.command, session=here.session, run_folder=tmp_path / "gone", name="1")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(MachineError, match="cannot write"):
        Child(gone).__enter__()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_many_children_leave_no_descriptor_and_no_process(launched, tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with Child(launched(READY + "time.sleep(60)")) as child:
            child.ready(20.0)
        assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["output-1.log", "trace-1.jsonl"]
        (tmp_path / "trace-1.jsonl").unlink()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.getpid() in {one.pid for one in process_tree.living()}, "the walk through /proc finds nobody"


def test_the_end_of_a_long_output_is_kept(tmp_path):
    path = tmp_path / "output"
    path.write_bytes(b"x" * 10_000 + "größer\n".encode())
    assert child_process.tail(path, 5) == "ßer\n"
    assert child_process.tail(path, 4) == "\ufffder\n"  # cut in the middle of a character
    assert child_process.tail(tmp_path / "none") == ""


def test_signals_without_a_name_are_numbered():
    assert child_process.signal_name(signal.SIGTERM) == "SIGTERM"
    assert child_process.signal_name(40) == "signal 40"


def test_records_of_another_order_are_no_answer(launched):
    late = READY.replace("-1", "5") + READY
    with Child(launched(late + "time.sleep(60)")) as child:
        found = child.ready(20.0)
    assert [r.order for r in found if isinstance(r, Ready)] == [5, -1]
