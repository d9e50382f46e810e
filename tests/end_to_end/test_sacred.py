"""A run under flatout is the run under plain Python: same output, exit status, files, and nothing of ours in sight."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import zipapp
from pathlib import Path

import pytest

import flatout
import warm
from flatout.run.script import as_typed
from tiers import some

SCRIPTS = Path(__file__).parent.parent / "scripts"
PYTHON = as_typed(sys.executable)
COMMAND = shutil.which("flatout", path=str(Path(PYTHON).parent))
RUN = [PYTHON, COMMAND, "run"] if COMMAND else [PYTHON, "-m", "flatout", "run"]
EXEC = [*RUN[:-1], "exec"]

ENVIRONMENT = {
    "PATH": f"{Path(PYTHON).parent}:/usr/bin:/bin",
    "HOME": os.environ.get("HOME", "/"),
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
}

needs_torch = pytest.mark.skipif(
    not any((Path(folder) / "torch").is_dir() for folder in sys.path), reason="needs PyTorch"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the scripts in it."""
    shutil.copytree(SCRIPTS, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


class Done:
    """How a run ended and what it left."""

    def __init__(self, command, stdin=b"", environment=None, start=subprocess.run, **settings):
        environment = {**ENVIRONMENT, **(environment or {})}
        done = start(command, input=stdin, capture_output=True, env=environment, timeout=120, check=False, **settings)
        self.status = done.returncode
        self.out, self.err = (re.sub("0x[0-9a-f]{6,}", "0x", text.decode()) for text in (done.stdout, done.stderr))

    def shown(self):
        return [
            f"status {self.status}",
            *self.out.splitlines(keepends=True),
            "stderr",
            *self.err.splitlines(keepends=True),
        ]


def files_in(folder):
    """Every file with its content; compiled modules and our own records apart."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".flatout", "__pycache__"} & set(path.parts)
    }


def both(folder, *words, options=(), flags=(), **settings):
    """The same script under plain Python and under flatout, each in the same untouched folder."""
    before = files_in(folder)
    plain = Done([PYTHON, *flags, *words], **settings)
    plain_files = files_in(folder)
    for name in plain_files.keys() - before.keys():
        (folder / name).unlink()
    start = [PYTHON, *flags, "-m", "flatout", "run"] if flags else RUN
    ours = Done([*start, "-q", *options, *words], **settings)
    return plain, plain_files, ours, files_in(folder)


def assert_same(folder, *words, **settings):
    plain, plain_files, ours, our_files = both(folder, *words, **settings)
    assert ours.shown() == plain.shown()
    assert our_files == plain_files
    return ours


def running(text):
    """Processes whose command line holds the text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in words and int(entry.name) != os.getpid():
                found.append(words)
    return found


def assert_nothing_left(text, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while running(text) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(text)


# -- what a script sees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("surroundings.py",), marks=pytest.mark.smoke),
        ("./surroundings.py", "--plan", "x", "--json", "-q", "-m", "y", "--", "--levers"),
        ("-m", "surroundings", "--plan", "x", "--json", "-q", "-m", "y"),
    ],
    ids=["path", "options that look like ours", "module"],
)
def test_a_script_sees_the_same_surroundings(folder, words):
    done = assert_same(folder, *words, stdin="größer\n".encode(), environment={"PYTHONPATH": ":/some:", "B": "2"})
    assert "a warning of the script's own" in done.err


@pytest.mark.parametrize(
    "flags", [("-u",), ("-OOB", "-W", "error::ImportWarning"), ("-Xutf8=0", "-P", "-s"), ("-bq", "-Xdev")], ids=" ".join
)
def test_flags_of_the_interpreter_are_passed_on_as_they_were_typed(folder, flags):
    assert_same(folder, "surroundings.py", flags=flags, environment={"PYTHONDONTWRITEBYTECODE": "1"})


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_an_interpreter_that_ignores_the_environment_runs_the_script_all_the_same(folder, flag):
    done = Done([PYTHON, flag, "-c", "import flatout"])
    if done.status:
        pytest.skip(f"flatout cannot be imported under {flag} here")
    plain, _, ours, _ = both(folder, "ends.py", "exit 3", flags=(flag,))
    assert ours.shown() == plain.shown()


def test_importtime_is_passed_on(folder):
    plain, _, ours, _ = both(folder, "ends.py", "exit 3", flags=("-X", "importtime"))
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert "import time:" in ours.err


@pytest.mark.smoke
def test_a_package_a_folder_and_an_archive_run_as_under_python(folder):
    package = folder / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("print('package', __name__)\n")
    (package / "__main__.py").write_text("from .inner import value\nprint(__name__, __package__, __file__, value)\n")
    (package / "inner" / "__init__.py").write_text("from .. import __name__ as value\n")
    (package / "inner" / "train.py").write_text("from . import value\nprint(__name__, __spec__.name, value)\n")
    assert_same(folder, "-m", "package")
    assert_same(folder, "-m", "package.inner.train", "--epochs", "3")
    plain = folder / "plain"
    plain.mkdir()
    (plain / "__main__.py").write_text("import sys, part\nprint(__name__, __file__, sys.argv, sys.path[0])\n")
    (plain / "part.py").write_text("print('part', __file__)\n")
    assert_same(folder, "plain", "a b")
    zipapp.create_archive(plain, folder / "app")
    assert_same(folder, "app", "a b")


def test_descriptors_that_the_shell_opened_reach_the_script(folder):
    script = "import os, sys; print(open(sys.argv[1]).read(), os.read(9, 10))"
    Path("reads.py").write_text(script)
    shell = "exec 9< reads.py; {} reads.py <(echo substituted)"
    plain = Done(["bash", "-c", shell.format(PYTHON)])
    ours = Done(["bash", "-c", shell.format(" ".join(RUN) + " -q")])
    assert "substituted" in plain.out
    assert ours.shown() == plain.shown()


def test_sitecustomize_and_usercustomize_of_the_user_run_once(folder):
    own = folder / "own"
    own.mkdir()
    # Flatout's own interpreter runs it as well; only what happens in the script's process is looked at.
    (own / "sitecustomize.py").write_text(
        "import sys\nif 'run' not in sys.orig_argv: print('site', __name__, __file__, __spec__.name)\n"
    )
    (own / "usercustomize.py").write_text("print('user', __name__, __file__)\n")
    done = assert_same(folder, "surroundings.py", environment={"PYTHONPATH": str(own)})
    assert done.out.count("site sitecustomize") == 1
    (own / "sitecustomize.py").write_text(
        "import sys\nif 'run' not in sys.orig_argv:\n    print('before')\n    raise ValueError('in it')\n"
    )
    assert "ValueError: in it" in assert_same(folder, "surroundings.py", environment={"PYTHONPATH": str(own)}).err


@pytest.mark.smoke
def test_children_of_every_kind_see_what_they_would_see_without_us(folder):
    assert_same(folder, "children.py", "delete", environment={"PYTHONPATH": "/some:/other"})
    assert_same(folder, "children.py")


def test_the_debugger_and_faulthandler_work(folder):
    Path("debugged.py").write_text(
        "import faulthandler\nx = 1\nbreakpoint()\nprint(x)\nfaulthandler.dump_traceback()\n"
    )
    assert_same(folder, "debugged.py", stdin=b"p x\nx = 2\nw\nc\n")


def test_a_script_runs_in_a_folder_that_is_gone(folder):
    shell = "mkdir gone; cd gone; rmdir ../gone; {} $OLDPWD/ends.py 'exit 3'"
    plain = Done(["bash", "-c", shell.format(PYTHON)])
    assert Done(["bash", "-c", shell.format(" ".join(RUN) + " -q")]).shown() == plain.shown()


def test_names_and_words_that_are_no_text_arrive_as_they_are(folder):
    script = b"a\377 \n.py"
    Path(os.fsdecode(script)).write_text("import sys\nprint(ascii(sys.argv), ascii(__file__))\n")
    assert_same(folder, os.fsdecode(script), b"\377\n", "")


def test_input_at_a_terminal_works(folder):
    Path("asks.py").write_text("import sys\nprint(sys.stdin.isatty(), sys.stdout.isatty(), input('name? '))\n")
    plain = at_terminal([PYTHON, "asks.py"], answer=b"me\n")
    assert at_terminal([*RUN, "-q", "asks.py"], answer=b"me\n") == plain
    assert b"True True me" in plain[1]


# -- how a script ends ---------------------------------------------------------------------------------------------

ENDS = [
    *("return", "exit 3", "exit 256", "exit -1", "exit text", "exit none", "exception", "chained", "interrupt"),
    *("_exit 7", "thread exit", "thread exception", "SIGTERM", "SIGKILL", "SIGINT", "SIGHUP", "SIGPIPE", "SIGABRT"),
    *("SIGRTMIN+3", "segfault", "own hook", "recursion"),
]


@pytest.mark.parametrize("end", some(ENDS, "return", "exit 3", "exception", "SIGKILL", "SIGINT"))
def test_a_script_ends_in_the_same_way(folder, end):
    assert_same(folder, "ends.py", end)


@pytest.mark.smoke
def test_the_two_lines_of_ours_are_all_that_is_added(folder):
    plain = Done([PYTHON, "ends.py", "exit text"])
    ours = Done([*RUN, "ends.py", "exit text"])
    lines = ours.err.splitlines(keepends=True)
    assert lines[0].startswith("flatout: ") and lines[-1].startswith("flatout: ")
    assert "".join(lines[1:-1]) == plain.err
    assert (ours.status, ours.out) == (plain.status, plain.out)


def test_a_run_without_stderr_says_nothing_on_stdout(folder):
    done = Done(["sh", "-c", f"{' '.join(RUN)} ends.py 'exit 3' 2>&-"])
    plain = Done(["sh", "-c", f"{PYTHON} ends.py 'exit 3' 2>&-"])
    assert (done.status, done.out) == (plain.status, plain.out)


def test_an_import_of_torch_that_fails_looks_as_it_would(folder):
    broken = folder / "torch"
    broken.mkdir()
    Path("imports.py").write_text(
        "import importlib, sys, traceback\n"
        "for attempt in (lambda: __import__('torch'), lambda: importlib.import_module('torch')):\n"
        "    try:\n"
        "        attempt()\n"
        "    except Exception:\n"
        "        traceback.print_exc()\n"
        "print('torch' in sys.modules, importlib.util.find_spec('torch').name)\n"
        "import torch\n"
    )
    for source in (
        "raise ImportError('no library')",
        "import no_such_module",
        "1 / 0",
        "syntax error",
        "import sys; sys.exit(5)",
    ):
        (broken / "__init__.py").write_text(source + "\n")
        assert_same(folder, "imports.py")


# -- signals -------------------------------------------------------------------------------------------------------


def start(command, **settings):
    """A command in a process group of its own, once it has said that it is ready."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
        **settings,
    )
    assert process.stdout.readline() == b"ready\n", process.communicate(timeout=30)
    return process


@pytest.mark.parametrize("name", some(["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGQUIT", "SIGALRM"], "SIGINT"))
def test_a_signal_arrives_once_whether_it_was_sent_to_us_or_to_the_group(folder, name):
    number = getattr(signal, name)
    for send in (os.kill, os.killpg):
        process = start([*RUN, "-q", "waits.py", name])
        time.sleep(0.1)
        send(process.pid, number)
        out, err = process.communicate(timeout=30)
        assert out.decode() == f"got ['{name}']\n"
        assert (process.returncode, err) == (0, b"")


def test_signals_to_a_group_arrive_once_each_also_the_second_time(folder):
    process = start([*RUN, "-q", "waits.py", "SIGUSR1,SIGUSR2"])
    time.sleep(0.1)
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(process.pid, number)
        time.sleep(0.2)
    assert process.communicate(timeout=30)[0].decode() == "got ['SIGUSR1', 'SIGUSR1', 'SIGUSR2']\n"


def test_a_script_that_leads_a_group_of_its_own_is_interrupted_all_the_same(folder):
    Path("leads.py").write_text("import os\nos.setpgrp()\nimport waits\n")
    process = start([*RUN, "-q", "leads.py", "SIGINT"])
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=30)[0].decode() == "got ['SIGINT']\n"


def test_a_script_that_ends_its_whole_group_ends_us_in_the_same_way(folder):
    for name in ("SIGTERM", "SIGKILL"):
        Path("ends_all.py").write_text(f"import os, signal\nos.killpg(0, signal.{name})\n")
        assert Done([*RUN, "-q", "ends_all.py"], start_new_session=True).status == -getattr(signal, name)


def test_a_signal_that_the_shell_ignores_stays_ignored(folder):
    Path("ignores.py").write_text(
        "import signal\nprint([signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)])\n"
    )
    shell = "trap '' HUP INT; {} ignores.py"
    plain = Done(["sh", "-c", shell.format(PYTHON)])
    assert Done(["sh", "-c", shell.format(" ".join(RUN) + " -q")]).shown() == plain.shown()


@pytest.mark.smoke
def test_the_script_dies_with_flatout(folder):
    process = start([*RUN, "-q", "waits.py", "SIGUSR1"])
    process.kill()
    process.communicate(timeout=30)
    assert_nothing_left("waits.py")


def at_terminal(command, *, answer=b"", interrupt_after=None):
    """Run a command at a terminal; its status and what was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, ENVIRONMENT)
    if answer:
        os.write(terminal, answer)
    shown, interrupted = b"", False
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
        if interrupt_after is not None and interrupt_after in shown and not interrupted:
            interrupted = True
            time.sleep(0.1)
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitpid(pid, 0)[1], re.sub(b"0x[0-9a-f]{6,}", b"0x", shown)


@pytest.mark.smoke
def test_ctrl_c_at_a_terminal_interrupts_the_script_once_and_ends_both_in_the_same_way(folder):
    Path("interrupted.py").write_text(
        "import time\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(20)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.3)  # a second one would end this\n"
        "    print('saved', flush=True)\n"
        "    raise\n"
    )
    plain = at_terminal([PYTHON, "interrupted.py"], interrupt_after=b"ready")
    ours = at_terminal([*RUN, "-q", "interrupted.py"], interrupt_after=b"ready")
    assert b"saved" in plain[1]
    assert ours == plain
    assert os.WIFSIGNALED(ours[0]) and os.WTERMSIG(ours[0]) == signal.SIGINT
    Path("exits.py").write_text(
        "import atexit, time\natexit.register(lambda: (print('ready', flush=True), time.sleep(20)))\n"
    )
    plain = at_terminal([PYTHON, "exits.py"], interrupt_after=b"ready")
    assert at_terminal([*RUN, "-q", "exits.py"], interrupt_after=b"ready") == plain


def test_a_run_can_be_stopped_and_continued_at_a_terminal(folder):
    typed = "{}; echo status $?\n"
    for command in ([PYTHON, "waits.py", "SIGUSR1"], [*RUN, "-q", "waits.py", "SIGUSR1"]):
        shell, terminal = pty.fork()
        if shell == 0:
            os.execvpe("bash", ["bash", "--norc", "-i"], {**ENVIRONMENT, "PS1": "$ "})
        with contextlib.closing(Terminal(terminal)) as at:
            at.type(typed.format(" ".join(command)))
            at.read_until(b"ready\r\n")
            at.type("\x1a")
            at.read_until(b"Stopped")
            at.type("kill -USR1 %1; fg\n")
            at.read_until(b"got ['SIGUSR1']")
            at.type("exit\n")
            os.waitpid(shell, 0)


class Terminal:
    """What a person at a terminal does."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.shown = b""

    def type(self, text):
        os.write(self.descriptor, text.encode())

    def read_until(self, text, limit_s=30.0):
        deadline = time.monotonic() + limit_s
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.descriptor], [], [], 0.5)[0]:
                self.shown += os.read(self.descriptor, 4096)
        self.shown = self.shown.partition(text)[2]

    def close(self):
        os.close(self.descriptor)


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3])
def test_ctrl_c_while_we_start_leaves_nothing(folder, delay_s):
    process = subprocess.Popen(
        [*RUN, "waits.py", "SIGUSR1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=30)[1].decode()
    # An interpreter that is interrupted in its own start calls that an error; it may be the script's or ours.
    assert process.returncode in (130, -signal.SIGINT) or (process.returncode == 1 and "Fatal Python error" in err), err
    assert_nothing_left("waits.py")


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@needs_torch
def test_a_training_script_prints_writes_and_sees_the_same(folder):
    stdin = b"one line\nthe rest\n"
    plain, plain_files, ours, our_files = both(folder, "trains.py", "14", stdin=stdin, start=warm.run)
    assert ours.shown() == plain.shown()
    assert our_files == plain_files
    for options in (("--levers", "threads=1"), ("--fixed", "--levers", "fused_optimizer")):
        for name in ("losses.txt", "checkpoint.pt"):
            (folder / name).unlink()
        levered = Done([*RUN, "-q", *options, "trains.py", "14"], stdin=stdin, start=warm.run)
        assert levered.shown() == plain.shown()
        assert files_in(folder).keys() == plain_files.keys()
        if "fused_optimizer" not in options:
            assert files_in(folder) == plain_files


@needs_torch
def test_the_peak_of_memory_use_that_a_script_reads_is_its_own(folder):
    assert Done([*RUN, "-q", "remembers.py"]).out == "True\n"


OURS = re.compile(rf"{re.escape(str(Path(flatout.__file__).parent))}|flatout:|sitecustomize")
FRAME = re.compile(r'^ *(?:\| )*File "([^"]+)", line (\d+), in (\S+)')


def frames(text, folder):
    """The frames of the script's own files in all tracebacks, and everything that is not a frame."""
    lines = text.splitlines()
    own = [line for line in lines if (frame := FRAME.match(line)) and frame[1].startswith(str(folder))]
    return own, [line for line in lines if line.endswith(("Error", "Group")) or "Error: " in line]


@needs_torch
@pytest.mark.parametrize("place", some(["before", "forward", "worker", "group"], "forward"))
def test_an_exception_shows_the_scripts_frames_and_none_of_ours(folder, place):
    plain, _, ours, _ = both(folder, "raises.py", place, start=warm.run)
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert frames(ours.err, folder) == frames(plain.err, folder)
    assert not OURS.search(ours.err.replace(str(folder), ""))


@needs_torch
def test_exceptions_that_a_script_prints_itself_show_its_own_frames(folder):
    plain, _, ours, _ = both(folder, "raises.py", "all", start=warm.run)
    assert ours.status == plain.status
    assert frames(ours.err, folder) == frames(plain.err, folder)


@needs_torch
@pytest.mark.parametrize("levers", ["", "bf16", "ahead=1,channels_last,fused_optimizer"])
def test_exceptions_that_a_script_catches_while_it_trains_hold_no_frame_of_ours(folder, levers):
    options = ("--levers", levers) if levers else ()
    plain, _, ours, _ = both(folder, "catches_its_own.py", "4", options=options, start=warm.run)
    assert (ours.status, len(ours.err.splitlines())) == (plain.status, len(plain.err.splitlines()))
    assert frames(ours.err, folder) == frames(plain.err, folder)
    assert not OURS.search(ours.err.replace(str(folder), ""))


@needs_torch
def test_a_script_may_have_a_module_named_flatout(folder):
    Path("flatout.py").write_text("value = 7\n")
    Path("mine.py").write_text(
        "import tiny\nimport flatout\nprint(flatout.value, [m for m in __import__('sys').modules if 'flatout' in m])\n"
    )
    plain = Done([PYTHON, "mine.py"])
    ours = Done([*RUN, "mine.py"], environment={"PYTHONSAFEPATH": ""})
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert "a module `flatout` of its own" in ours.err.splitlines()[-1]


@needs_torch
def test_torch_may_be_imported_late_and_in_a_thread(folder):
    Path("late.py").write_text(
        "import threading\n"
        "thread = threading.Thread(target=__import__, args=('tiny',))\n"
        "thread.start()\nthread.join()\n"
        "import sys\nprint('torch' in sys.modules, [type(f).__name__ for f in sys.meta_path])\n"
    )
    plain = Done([PYTHON, "late.py"])
    ours = Done([*RUN, "late.py"])
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert re.search(r"\d+ steps", ours.err)


@needs_torch
def test_training_in_spawned_children_is_followed(folder):
    plain = Done([PYTHON, "spawns.py"])
    ours = Done([*RUN, "--levers", "threads=1", "spawns.py"])
    assert (ours.status, sorted(ours.out.splitlines())) == (plain.status, sorted(plain.out.splitlines()))
    assert re.search(r"flatout: 1\d\d steps", ours.err), ours.err  # of the first, and of one of the two after it


@needs_torch
def test_ctrl_c_in_training_ends_the_script_as_it_would_and_leaves_nothing(folder):
    process = start([*RUN, "-q", "endless.py"])
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.decode().splitlines()[-1] == "KeyboardInterrupt"
    assert not OURS.search(err.decode().replace(str(folder), ""))
    assert_nothing_left("endless.py")


# -- when recording fails ------------------------------------------------------------------------------------------


@needs_torch
def test_training_goes_on_when_its_record_cannot_be_kept(folder):
    plain = Done([PYTHON, "damages.py", "nothing"], start=warm.run)
    for damage in ("run folder", "trace", "orders", "file size"):
        ours = Done([*RUN, "--levers", "threads=1", "damages.py", damage], start=warm.run)
        assert (ours.status, ours.out) == (plain.status, plain.out)
        assert all(line.startswith("flatout: ") for line in ours.err.splitlines()), ours.err
        shutil.rmtree(".flatout")


@pytest.mark.smoke
def test_a_folder_that_cannot_be_written_is_said_in_one_line(folder):
    Path(".flatout").write_text("in the way")
    plain = Done([PYTHON, "ends.py", "exit 3"])
    ours = Done([*RUN, "ends.py", "exit 3"])
    assert (ours.status, ours.out) == (plain.status, plain.out)
    first, *_ = ours.err.splitlines()
    assert "no record is kept: cannot write" in first
    assert len(ours.err.splitlines()) == 2


@needs_torch
def test_levers_are_engaged_where_the_working_folder_cannot_be_written(folder):
    Path(".flatout").write_text("in the way")
    Path("temporary").mkdir()
    environment = {"TMPDIR": str(folder / "temporary")}
    ours = Done(
        [*RUN, "--levers", "threads=1", "--json", "told.json", "tiny.py"], environment=environment, start=warm.run
    )
    assert ours.status == 0
    assert '"engaged": true' in Path("told.json").read_text()
    assert not list(Path("temporary").glob("flatout-*"))


def test_a_full_disk_does_not_stop_a_run(folder):
    full = folder / "full"
    full.mkdir()
    script = (
        f"mount -t tmpfs -o size=16k none {full} && cp ends.py {full} && cd {full}"
        f" && TMPDIR={full} {' '.join(RUN)} ends.py 'exit 3'"
    )
    allowed = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", full], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("mount namespaces are forbidden here")
    plain = Done([PYTHON, "ends.py", "exit 3"])
    ours = Done(["unshare", "-rm", "sh", "-c", script])
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert ours.err.splitlines()[1:] == ["flatout: nothing was recorded"]


def test_a_summary_that_cannot_be_written_does_not_change_the_status(folder):
    ours = Done([*RUN, "-q", "--json", "no/such/folder.json", "ends.py", "exit 3"])
    assert ours.status == 3
    assert ours.err == "flatout: cannot write `no/such/folder.json`: No such file or directory\n"


# -- exec ----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_launcher_gets_its_words_and_its_status_is_ours(folder):
    for words in (
        ["sh", "-c", "exit 5"],
        ["sh", "-c", "kill -9 $$"],
        ["printf", "%s|", "a b", "", "'\"$x", "--json", "-q"],
    ):
        plain = Done(words)
        assert Done([*EXEC, "-q", "--", *words]).shown() == plain.shown()


def test_a_launcher_that_is_not_there_is_an_error_in_three_parts(folder):
    done = Done([*EXEC, "-q", "--", "no-such-launcher"])
    assert done.status == 2
    assert done.err.startswith("error: cannot start `no-such-launcher`\ncause: there is no such program")


def test_a_script_where_a_command_is_wanted_is_told_what_to_type_before_anything_is_announced(folder):
    (folder / "train.py").write_text("print(1)")
    done = Done([*EXEC, "--", "train.py", "--lr", "0.1"])
    assert done.status == 2
    assert done.err.startswith("error: cannot start `train.py`\n")
    assert "`flatout exec -- python train.py --lr 0.1`" in done.err


@pytest.mark.smoke
@needs_torch
def test_programs_one_after_the_other_are_each_reached(folder):
    words = ["sh", "-c", f"{PYTHON} tiny.py && echo 'between \"them\"' && {PYTHON} tiny.py; exit 4"]
    plain = Done(words)
    ours = Done([*EXEC, "--levers", "threads=1", "--json", "told.json", "--", *words])
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert "2 processes" in ours.err.splitlines()[-1]
    assert "failed" not in ours.err


@needs_torch
def test_torchrun_with_two_processes_is_reached(folder):
    torchrun = shutil.which("torchrun", path=str(Path(PYTHON).parent))
    launch = [PYTHON, "-m", "torch.distributed.run"] if torchrun is None else [PYTHON, torchrun]
    words = [*launch, "--nproc-per-node", "2", "--standalone", "ranks.py", "--json", "two words"]
    for _attempt in range(4):
        ours = Done([*EXEC, "--levers", "threads=1", "--", *words])
        if "terminate called without an active exception" not in ours.err:
            break  # gloo's own threads abort one in ten such runs as they end, plain or not
    assert ours.status == 0, ours.err
    assert sorted(ours.out.splitlines()) == ["0 ['--json', 'two words'] True", "1 ['--json', 'two words'] True"]
    assert "2 processes" in ours.err.splitlines()[-1]


# -- many times ----------------------------------------------------------------------------------------------------


def test_two_hundred_runs_leave_no_process_no_descriptor_and_no_pipe(folder):
    Path("nothing.py").write_text("")
    Path("often.py").write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from flatout.run import folder, foreground\n"
        "def once():\n"
        "    with folder.for_run('nothing') as (place, problem):\n"
        "        what = foreground.Foreground(command=(sys.executable, '-S', 'nothing.py'), script='', arguments=(),\n"
        "            run_folder=place, levers={}, registry={})\n"
        "        assert foreground.run(what).exit_code == 0\n"
        "once()\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        "for _ in range(200): once()\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
        "children = Path(f'/proc/self/task/{os.getpid()}/children').read_text()\n"
        "assert not children, children\n"
        "assert len(list(Path('.flatout').glob('nothing-*'))) == 201\n"
        "assert not [p for p in Path('.flatout').rglob('*') if p.is_fifo()]\n"
    )
    done = Done([PYTHON, "often.py"])
    assert done.status == 0, done.err
    assert_nothing_left("nothing.py")


@needs_torch
def test_a_plan_that_becomes_slower_in_the_middle_of_a_run_is_released(folder):
    """A minute: the check at the start, then windows of five seconds, of which two have to show it."""
    words = ["--levers", "bf16", "--json", "summary.json", "turns.py", "80", "35", "1000"]
    ran = Done([*RUN, *words], start=warm.run)
    assert ran.status == 0
    summary = json.loads((folder / "summary.json").read_text())
    released = next(one for one in summary["decisions"] if one["kind"] != "kept")
    assert released["kind"] == "released" and released["ratio"] < 0.6 and not summary["engaged"]
    assert f"from step {released['step']:,} on released" in ran.err
    trace = (Path(summary["run"]) / "trace-run.jsonl").read_text()
    assert "released at 0." in trace, "each decision is in the trace"


@needs_torch
def test_a_run_that_learns_is_the_scripts_own(folder):
    """What it finds depends on the machine, which may be busy; output, files and status are the script's."""
    plain, plain_files, _, _ = both(folder, "trains.py", "40", start=warm.run)
    for name in ("losses.txt", "checkpoint.pt"):
        (folder / name).unlink(missing_ok=True)
    learning = Done([*RUN, "--learn", "--accept", "exact", "trains.py", "40"], start=warm.run)
    assert (learning.out, learning.status) == (plain.out, plain.status)
    found = files_in(folder)
    found.pop("flatout.toml", None)
    assert found == plain_files
    assert "learning: levers that can be toggled" in learning.err
    assert "ended before it had learned" in learning.err or "tried in" in learning.err


@needs_torch
@pytest.mark.parametrize("beside", [("--fixed",), ("--recheck",), ("--levers", "bf16"), ("--plan", "some.toml")])
def test_learning_and_what_leaves_nothing_to_learn_are_refused_together(folder, beside):
    refused = Done([*RUN, "--learn", *beside, "trains.py"])
    assert refused.status == 2 and f"`--learn` and `{beside[0]}` cannot be combined" in refused.err
    assert "cause:" in refused.err and "hint:" in refused.err
