"""The file that reaches every Python: invisible, harmless to interpreters of any age, and there when torch comes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.child.orders import SessionSpec
from flatout.records.as_json import to_json
from flatout.run.child_process import BOOTSTRAP, session_files

VERSIONS = ("2.7", "3.6", "3.8", "3.10", "3.12", "3.13", "3.14")
FOUND = [path for version in VERSIONS if (path := shutil.which(f"python{version}")) and "shims" not in path]
OTHER_PYTHONS = FOUND + [str(path) for path in sorted(Path.home().glob(".pyenv/versions/*/bin/python"))]


@pytest.fixture
def reached(tmp_path):
    """Runs code in a fresh interpreter that the bootstrap has entered, with a torch that is empty."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("value = 1\n")
    spec = SessionSpec(mode="run", **session_files(tmp_path, "run"))
    session = tmp_path / "session-run.json"
    session.write_text(json.dumps(to_json(spec)))

    def run(code, *flags, python=sys.executable, own=None, **more):
        environment = {"PATH": "/usr/bin:/bin", "FLATOUT_SESSION": str(session), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = str(BOOTSTRAP) + (f":{own}" if own else "")
        if own is not None:
            environment["FLATOUT_PYTHONPATH"] = str(own)
        environment.update(more)
        command = [python, *flags, "-c", code]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    run.trace = tmp_path / "trace-run.jsonl"
    run.folder = tmp_path
    return run


def failures(run):
    return [json.loads(line) for line in run.trace.read_text().splitlines()] if run.trace.exists() else []


def test_nothing_of_ours_is_to_be_seen(reached):
    code = (
        "import os, sys; print([n for n in os.environ if 'FLATOUT' in n or n == 'PYTHONPATH'],"
        " getattr(sys.modules.get('sitecustomize'), '__file__', None), [p for p in sys.path if 'bootstrap' in p])"
    )
    plain = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    assert reached(code) == plain.stdout, "a system may have a sitecustomize of its own"
    assert plain.stdout.startswith("[] ") and plain.stdout.endswith(" []\n")
    assert reached("import os; print(os.environ['PYTHONPATH'])", own="/own") == "/own\n"
    assert reached("import os; print(repr(os.environ['PYTHONPATH']))", own="") == "''\n"


@pytest.mark.parametrize(
    ("own", "exported", "left"),
    [
        ("/own", "/lib:{0}:/own", "/lib:/own"),
        ("/own", "{0}:/own:/lib", "/own:/lib"),
        (None, "/lib:{0}", "/lib:"),
        (None, "{0}:/lib", ":/lib"),
    ],
)
def test_what_a_program_in_between_adds_to_the_path_stays_and_reaches_children(reached, own, exported, left):
    code = "import os; print(os.environ['PYTHONPATH'])"
    child = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={more}os.environ{end})"
    path = exported.format(BOOTSTRAP)
    assert reached(code, own=own, PYTHONPATH=path) == f"{left}\n"
    for more, end in (("", ""), ("{**", "}")):
        wrapped = f"import sys; sys.argv.append({code!r}); " + child.format(more=more, end=end)
        assert reached(wrapped, own=own, PYTHONPATH=path) == f"{left}\n"


def test_the_order_of_the_environment_stays(reached):
    code = "import os; print([name for name in os.environ if name in ('A', 'PYTHONPATH', 'Z')])"
    environment = {"A": "1", "PYTHONPATH": f"{BOOTSTRAP}:/own", "Z": "2", "FLATOUT_PYTHONPATH": "/own"}
    environment["FLATOUT_SESSION"] = "/none"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['A', 'PYTHONPATH', 'Z']\n"


def test_after_torch_and_subprocess_nothing_is_left_in_the_import_system(reached):
    code = (
        "import sys; num = len(sys.meta_path)\n"
        "import subprocess, torch\n"
        "print(len(sys.meta_path) - num, type(torch.__spec__).__name__, torch.__loader__ is torch.__spec__.loader,\n"
        "      type(torch.__spec__).__module__, torch.__spec__._initializing)"
    )
    assert reached(code) == "-1 ModuleSpec True _frozen_importlib False\n"


def test_a_specification_that_is_only_looked_at_looks_as_always(reached):
    code = "import importlib.util as u; s = u.find_spec('torch'); print(repr(s)[:24], type(s).__name__, s.has_location)"
    assert reached(code) == "ModuleSpec(name='torch', ModuleSpec True\n"


def test_we_enter_when_the_import_is_complete(reached):
    # No real framework here: entering fails, and the trace says why.
    assert reached("import torch; print(torch.value)") == "1\n"
    (failure,) = failures(reached)
    assert (failure["stage"], failure["kind"]) == ("enter", "failure")


def test_a_failing_import_is_not_entered_and_may_be_tried_again(reached):
    (reached.folder / "torch" / "__init__.py").write_text("import os\nif 'again' not in os.environ: 1 / 0\n")
    code = (
        "import os, traceback\n"
        "try:\n    import torch\n"
        "except ZeroDivisionError: print(len(traceback.format_exc().splitlines()))\n"
        "os.environ['again'] = '1'\n"
        "import torch"
    )
    plain = subprocess.run([sys.executable, "-c", code], cwd=reached.folder, capture_output=True, text=True, check=True)
    assert reached(code) == plain.stdout
    assert len(failures(reached)) == 1  # entered once, the second time


def test_a_process_that_comes_after_one_that_got_in_notes_nothing(reached):
    (reached.folder / "claim-run").write_text("1")
    reached("import torch")
    assert failures(reached) == []


def test_two_threads_that_import_at_once_both_get_the_module(reached):
    (reached.folder / "torch" / "__init__.py").write_text("import time; time.sleep(0.1); value = 1\n")
    code = (
        "import threading\nfound = []\n"
        "def work():\n    import torch, subprocess; found.append((torch.value, subprocess.run.__name__))\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; print(found)"
    )
    assert reached(code) == f"{[(1, 'run')] * 4}\n"
    assert len(failures(reached)) == 1


@pytest.mark.parametrize(
    ("source", "entered"),
    [
        ("flatout.py", False),
        ("flatout/__init__.py", False),
        ("flatout/part.py", True),  # an installed package comes before a mere folder, for the user as well
        ("flatout/pyproject.toml", True),
    ],
)
def test_a_module_of_the_users_that_is_named_as_we_are_stays_his(reached, source, entered):
    path = reached.folder / source
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    code = "import torch, sys; print([getattr(m, '__file__', None) for n, m in sys.modules.items() if n == 'flatout'])"
    shown = reached(code)
    (failure,) = failures(reached)
    assert ("of its own" in failure["message"]) is not entered
    assert ("run/" in shown or "src/flatout" in shown or "site-packages" in shown) is entered, shown


def test_a_module_of_the_users_that_was_imported_before_stays_his(reached):
    (reached.folder / "elsewhere").mkdir()
    (reached.folder / "elsewhere" / "flatout.py").write_text("value = 2\n")
    code = "import sys; sys.path.insert(0, 'elsewhere'); import flatout, torch; print(flatout.value)"
    assert reached(code) == "2\n"
    assert "of its own" in failures(reached)[0]["message"]


def test_a_session_that_cannot_be_read_is_no_reason_to_fail(reached):
    assert reached("import torch; print(torch.value)", FLATOUT_SESSION="/no/such/session") == "1\n"


def test_warnings_that_are_errors_do_not_reach_us(reached):
    assert reached("import torch; print(torch.value)", "-W", "error") == "1\n"


def test_a_finder_with_specifications_of_its_own_is_left_alone(reached):
    code = (
        "import sys, importlib.machinery as m\n"
        "class Spec(m.ModuleSpec):\n    __slots__ = ('more',)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': return Spec('torch', m.BuiltinImporter)\n"
        "class Old: pass\n"
        "sys.meta_path[1:1] = [Old(), Finder()]\n"
        "try:\n    import torch\nexcept ImportError as problem: print(type(problem).__name__)"
    )
    assert "ImportError" in reached(code)


@pytest.mark.parametrize("python", OTHER_PYTHONS or [None])
def test_other_interpreters_start_as_always(reached, python):
    if python is None:
        pytest.skip("no other Python here: install python3.8 or python2.7")
    own = reached.folder / "own"
    own.mkdir()
    assert reached("import os; print(1 + 1)", python=python) == "2\n"
    (own / "sitecustomize.py").write_text("print('own site')\n")
    assert reached("import sitecustomize; print(1 + 1)", python=python, own=own) == "own site\n2\n"


def test_the_file_is_written_so_that_any_python_can_read_it():
    source = (BOOTSTRAP / "sitecustomize.py").read_text()
    assert source.isascii()
    for new in ("f'", 'f"', "->", ":=", "nonlocal", "async ", "match "):
        assert new not in source, f"{new} is not read by Python 2.7"


def test_the_folder_holds_nothing_else_that_a_script_could_import():
    assert [path.name for path in Path(BOOTSTRAP).iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]
