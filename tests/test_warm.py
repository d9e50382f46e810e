"""A fork of a process that has PyTorch loaded is as good as a fresh interpreter, and is one where it says so."""

import os
import signal
import subprocess
import sys

import pytest

import warm
from flatout.run import isolation

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TESTS_COLD")) or sys.platform != "linux",
    reason="fresh interpreters are wanted, or there is no `clone3`",
)

ENVIRONMENT = {**os.environ, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
IS_FORK = "import os, sys; print('torch' in sys.modules, os.getppid())"
ENDS = {
    "return": "print('in it')",
    "code": "sys.exit(300)",
    "text": "sys.exit('some text')",
    "exception": "{}['missing']",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "os.kill(os.getpid(), 15)",
    "at exit": "import atexit; atexit.register(print, 'later')",
    "a file left open": "kept = open('left', 'w'); kept.write('all of it')",
    "a thread": "import threading; threading.Timer(0.2, print, ['from it']).start()",
    "abort": "os.abort()",
    "exit at once": "os._exit(7)",
}


def python(*words, start=warm.run, env=None, **settings):
    environment = {**ENVIRONMENT, **(env or {})}
    return start(
        [sys.executable, *words], capture_output=True, text=True, timeout=100, env=environment, check=False, **settings
    )


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_an_interpreter_ends(end, tmp_path):
    (tmp_path / "ends.py").write_text(
        f"import os, sys\nprint(__name__, sys.argv, __file__, sys.stdin.read())\n{ENDS[end]}\n"
    )
    seen = []
    for start in (subprocess.run, warm.run):
        done = python("ends.py", "word", start=start, cwd=tmp_path, input="typed")
        left = (tmp_path / "left").read_text() if (tmp_path / "left").exists() else None
        seen.append((done.returncode, done.stdout, done.stderr, left))
    assert seen[0] == seen[1]


def test_it_is_a_fork_and_a_child_of_who_asks():
    assert python("-c", IS_FORK).stdout == f"True {os.getpid()}\n"
    assert python("-c", "import torch; print(torch.get_num_threads())", env={"OMP_NUM_THREADS": "3"}).stdout == "3\n"


@pytest.mark.parametrize("name", ["LD_BIND_NOW", "MALLOC_ARENA_MAX", "OMP_PROC_BIND", "PYTHONOPTIMIZE", "LC_ALL"])
def test_what_is_read_at_the_start_takes_a_fresh_interpreter(name):
    assert python("-c", IS_FORK, env={name: "1"}).stdout == f"False {os.getpid()}\n"


def test_flags_of_the_interpreter_and_what_no_fork_has_take_a_fresh_one():
    assert python("-u", "-c", IS_FORK).stdout.startswith("False")
    assert python("-c", IS_FORK, preexec_fn=os.getpid).stdout.startswith("False")


def test_what_flatout_starts_is_a_fork_and_dies_with_it(tmp_path):
    (tmp_path / "train.py").write_text(f"{IS_FORK}\nprint(os.getpid(), flush=True)\nif len(sys.argv) > 1: input()\n")
    assert python("-m", "flatout", "run", "-q", "train.py", cwd=tmp_path).stdout.startswith("True")
    command = [sys.executable, "-m", "flatout", "run", "-q", "train.py", "waits"]
    with warm.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"True %d\n" % process.pid
        assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b"", "the pipe has ended, so the script has"


@pytest.mark.skipif(isolation.available() is not None, reason="trials cannot be isolated here")
def test_an_isolated_fork_writes_nothing_to_the_folder(tmp_path):
    folder, run = tmp_path / "work", tmp_path / "run"
    folder.mkdir()
    code = f"{IS_FORK}; open('probe', 'w').write('written'); print(os.listdir())"
    command = isolation.isolate(
        [sys.executable, "-c", code], folder=folder, script_folder=None, run_folder=run, scratch=run / "scratch"
    )
    done = python(*command[1:], cwd=folder)
    assert done.stdout == f"True {os.getpid()}\n['probe']\n", done.stderr
    assert isolation.refusal(run / "scratch") is None and not list(folder.iterdir())
    isolation.discard(run / "scratch")
