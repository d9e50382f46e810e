"""The house rules that a machine can check; what they are for stands in DESIGN and CONTRIBUTING.

A rule that must be broken is broken in one of the lists below, with the reason beside it. An exception that is no
longer needed fails as well, so that the lists stay short.
"""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "flatout"
LEVERS = SOURCE / "frameworks" / "pytorch" / "levers"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 45
"""Without the docstring. Files of about 400 lines and functions of about 40 are the aim; these are the walls: a file is
split where it asks two questions, never by its length."""

BANNED_NAMES = {"utils", "util", "manager", "managers", "helper", "helpers", "data", "info"}

#: Packages of ours that a run may load into the user's process, besides the standard library and torch: what they may
#: import in turn is a contract in `pyproject.toml`. Every module is time before the first step: they are lazy inside.
LOADED_IN_THE_USERS_PROCESS = {"child", "errors", "frameworks", "guest", "machine", "records"}

#: Words that may begin a message in spite of the house's lower case.
PROPER_NAMES = ("AppArmor", "CUDA", "Ctrl-C", "CPU", "GPU", "JSON", "Linux", "PyTorch", "Python", "TOML")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# -- size, names, docstrings ---------------------------------------------------------------------------------------


def test_no_file_is_longer_than_a_reader_can_keep_in_mind():
    long = {name_of(p) for p in modules() if len(p.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES}
    assert long == set(), f"more than {MAX_FILE_LINES} lines"


def test_no_function_is_longer_than_a_screen():
    long = {
        f"{name_of(path)}:{function.name}"
        for path in modules()
        for function in functions_of(tree_of(path))
        if lines_of(function) > MAX_FUNCTION_LINES
    }
    assert long == set(), f"more than {MAX_FUNCTION_LINES} lines without the docstring"


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_every_module_says_what_it_answers():
    assert [name_of(path) for path in modules() if not ast.get_docstring(tree_of(path))] == [], "without a docstring"


def test_no_module_has_a_name_that_says_nothing():
    named = {part for path in modules() for part in path.relative_to(SOURCE).with_suffix("").parts}
    assert not named & BANNED_NAMES


# -- imports -------------------------------------------------------------------------------------------------------


def test_torch_is_imported_at_top_level_only_where_pytorch_is_the_subject():
    found = {
        name_of(path)
        for path in modules()
        for name in imports_at_top_level(tree_of(path).body)
        if name.split(".")[0] in ("torch", "numpy")
        and not (path.is_relative_to(LEVERS.parent) and path.parent != LEVERS)
    } - {"trials/search/effects.py"}  # linear algebra of the search's model, in the parent alone
    assert not found, "levers, too, import torch only when they are engaged: the parent reads their descriptions"


def imported_by(tree: ast.Module) -> Iterator[str]:
    """Names of modules, or of what may be one, also inside functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_module_imports_itself_by_way_of_others():
    """Not even inside functions or for types: what refers to each other is one thing, or needs a third."""
    names = {"flatout." + name_of(path).removesuffix(".py").replace("/", "."): path for path in modules()}
    left = {
        name: {one for one in imported_by(tree_of(path)) if one in names and one != name}
        for name, path in names.items()
    }
    while ready := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in ready:
            del left[name]
    assert sorted(left) == []


def imports_at_top_level(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "False"):
            yield from imports_at_top_level(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from imports_at_top_level(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from imports_at_top_level(handler.body)


@pytest.fixture
def fresh(tmp_path):
    """Runs code in a fresh interpreter; returns the names in `sys.modules` before it and after it."""

    def run(code: str, environment: dict[str, str] | None = None) -> tuple[set[str], set[str]]:
        answer = tmp_path / f"modules-{len(list(tmp_path.iterdir()))}.json"
        head = (
            "import atexit, json, sys\n"
            "_before = sorted(sys.modules)\n"
            "@atexit.register\n"
            "def _tell():\n"
            f"    with open({str(answer)!r}, 'w') as file: json.dump([_before, sorted(sys.modules)], file)\n"
        )
        command = [sys.executable, "-c", head + code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        before, after = json.loads(answer.read_text(encoding="utf-8"))
        return set(before), set(after)

    return run


def test_importing_flatout_imports_nothing_else(fresh):
    before, after = fresh("import flatout")
    new = after - before
    assert {name for name in new if name.split(".")[0] == "flatout"} == {"flatout"}
    assert {name.split(".")[0] for name in new} - {"flatout"} <= sys.stdlib_module_names


def test_reading_the_levers_descriptions_imports_no_framework(fresh):
    _, after = fresh("from flatout.frameworks.pytorch.levers import registry; registry()")
    assert "flatout.frameworks.pytorch.levers.bf16" in after
    assert not after & {"torch", "numpy"}


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("tune", "--help"),
        ("run", "--help"),
        ("report", "--help"),
    ],
    ids=" ".join,
)
def test_asking_for_help_loads_nothing_heavy(fresh, words):
    code = (
        f"import sys; sys.argv = ['flatout', *{words!r}]\n"
        "from flatout.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code"
    )
    _, after = fresh(code)
    assert "flatout.cli" in after
    assert not after & {"torch", "numpy", "rich", "scipy", "jinja2", "tomlkit", "flatout.trials"}


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=2)
for batch, in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def session_in(folder: Path) -> dict[str, str]:
    """The environment with which `flatout run` starts a script."""
    from flatout.child.orders import SessionSpec
    from flatout.run.child_process import Launch, environment_for, session_files, write_session

    session = SessionSpec(mode="run", **session_files(folder, "run"))
    os.mkfifo(session.orders)
    return environment_for(write_session(Launch(command=(), session=session, run_folder=folder, name="run")), {})


def test_what_a_run_loads_into_the_users_process_is_of_few_packages(fresh, tmp_path):
    pytest.importorskip("torch", reason="a run needs PyTorch: pip install 'flatout[pytorch]'")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    _, plain = fresh(SCRIPT)
    environment = session_in(run_folder)
    # Held open, as the parent holds it, so that the child's end does not close.
    orders = os.open(run_folder / "orders-run", os.O_RDWR)
    try:
        _, watched = fresh(SCRIPT, environment)
    finally:
        os.close(orders)
    assert (run_folder / "trace-run.jsonl").exists(), "the child did not record: it would have loaded less"
    ours = {name for name in watched if name.split(".")[0] == "flatout"}
    assert {name.split(".")[1] for name in ours - {"flatout"}} == LOADED_IN_THE_USERS_PROCESS
    others = {name.split(".")[0] for name in watched - plain} - {"flatout", "torch"}
    assert others <= sys.stdlib_module_names, "a package that the script alone would not have loaded"


# -- errors --------------------------------------------------------------------------------------------------------


def error_names() -> set[str]:
    """`FlatoutError` and what is derived from it, in one file."""
    found = {"FlatoutError"}
    for node in tree_of(SOURCE / "errors.py").body:
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in found for b in node.bases):
            found.add(node.name)
    return found


def made_errors() -> list[tuple[str, ast.Call]]:
    names = error_names()
    return [
        (f"{name_of(path)}:{node.lineno}", node)
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def test_every_error_says_what_happened_why_and_what_to_do():
    made = made_errors()
    assert made
    assert [f"{where}: {problem}" for where, call in made for problem in wrong_with(call)] == []


def wrong_with(call: ast.Call) -> Iterator[str]:
    if not call.args:
        yield "an error begins with what happened"
    if not {"cause", "hint"} <= {keyword.arg for keyword in call.keywords}:
        yield "`cause` and `hint` are needed"
    parts = {**dict(zip(["error"], call.args, strict=False)), **{k.arg: k.value for k in call.keywords if k.arg}}
    for part, value in parts.items():
        for text, is_head, is_tail in literals(value):
            if is_head and re.match(r"[A-Z]", text) and not text.startswith(PROPER_NAMES):
                yield f"`{part}` begins in lower case: {text!r}"
            if is_tail and re.search(r"(?<!\.)\.$", text.rstrip()):
                yield f"`{part}` has no final stop: {text!r}"


def test_the_check_of_errors_finds_wrong_ones():
    wrong = {
        "FlatoutError()": 2,
        "FlatoutError('a', cause='b')": 1,
        "FlatoutError('A', cause='b.', hint='c...')": 2,
        "FlatoutError(f'A {b}', cause=f'{b}.', hint='Linux')": 2,
        "FlatoutError('a', cause='b', hint='c')": 0,
    }
    assert {text: len([*wrong_with(ast.parse(text, mode="eval").body)]) for text in wrong} == wrong


def literals(node: ast.expr) -> Iterator[tuple[str, bool, bool]]:
    """Texts that stand at the beginning or the end of a message, as far as they are written down."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield node.value, True, True
    elif isinstance(node, ast.JoinedStr):
        first, last = node.values[0], node.values[-1]
        if isinstance(first, ast.Constant):
            yield first.value, True, False
        if isinstance(last, ast.Constant):
            yield last.value, False, True
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from ((text, True, False) for text, head, _ in literals(node.left) if head)
        yield from ((text, False, True) for text, _, tail in literals(node.right) if tail)


# -- levers --------------------------------------------------------------------------------------------------------


def lever_files() -> list[Path]:
    return [path for path in sorted(LEVERS.glob("*.py")) if path.stem != "__init__"]


def test_a_lever_is_one_file_one_registry_line_one_row_in_the_docs_and_a_test():
    from flatout.frameworks.pytorch.levers import LEVERS as registered

    page, tests = (ROOT / "docs" / "reference" / "levers.md").read_text(encoding="utf-8"), texts_of_tests()
    problems, files = [], lever_files()
    assert files
    for path in files:
        here = [kind for kind in registered if kind.__module__.endswith(f".levers.{path.stem}")]
        if len(here) != 1:
            problems.append(f"`{path.name}` has {len(here)} lines in the registry, not one")
            continue
        name = here[0].name
        if name != path.stem:
            problems.append(f"`{path.name}` is the file of `{name}`: a lever's file bears its name")
        if len(re.findall(rf"^\| \[`{name}`\]", page, re.MULTILINE)) != 1:
            problems.append(f"`{name}` has no row or several: `python scripts/make_reference.py`")
        named = re.compile(rf"""["'\s,`]{name}["'=,\s]|\b{here[0].__name__}\b""")
        if not any(map(named.search, tests)):
            problems.append(f"no test names the lever `{name}`")
    assert problems == []


def texts_of_tests() -> list[str]:
    own = {Path(__file__), ROOT / "tests" / "unit" / "test_docs.py", ROOT / "tests" / "golden" / "test_surface.py"}
    return [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path not in own]


# -- names of frameworks and levers stay where they belong -----------------------------------------------------------

OF_ONE_FRAMEWORK = {
    "frameworks/__init__.py": "the list of frameworks",
    "child/bootstrap/sitecustomize.py": "waits for the import of each, and may import nothing to learn which they are",
    "run/rank_launcher.py": "ranks are started by PyTorch's own launcher",
}
"""Files outside `frameworks/pytorch` that name it, and why."""

OTHER_MEANINGS = {
    ("judge/causes.py", "tf32"): "arithmetic",
    ("records/ceilings.py", "tf32"): "arithmetic",
    ("records/ceilings.py", "bf16"): "a processor's feature",
    ("machine/read.py", "bf16"): "a processor's feature",
    ("judge/activity.py", "workers"): "a kind of sample",
    ("report/tuning.py", "threads"): "the number of threads",
}
"""Texts in code that read like a lever's name and mean something else."""


def texts_in_code(path: Path) -> set[str]:
    """String constants that are no docstrings, and what is imported."""
    tree = tree_of(path)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said]
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {node.value for node in found if isinstance(node.value, str)} | imported


def outside_frameworks() -> Iterator[tuple[str, Path]]:
    for path in modules():
        if not name_of(path).startswith("frameworks/pytorch/"):
            yield name_of(path), path


def test_no_lever_is_named_outside_its_framework():
    levers = {path.stem for path in LEVERS.glob("*.py")} - {"__init__", "ranks"}  # the word for what the parent starts
    found = {(name, text) for name, path in outside_frameworks() for text in texts_in_code(path) & levers}
    assert found == {*OTHER_MEANINGS}, "what a lever needs is stated by the lever (`flatout.frameworks.lever.Lever`)"


def test_no_framework_is_named_outside_its_package():
    words = re.compile(r"\b(torch|pytorch)\b", re.IGNORECASE)
    found = {name for name, path in outside_frameworks() if any(words.search(text) for text in texts_in_code(path))}
    assert found == {*OF_ONE_FRAMEWORK}, "`flatout.frameworks.contract.Kind` has what is to be known of one"


def test_the_process_waits_for_the_import_of_every_framework():
    from flatout import frameworks

    tree = ast.parse((SOURCE / "child/bootstrap/sitecustomize.py").read_text(encoding="utf-8"))
    awaited = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_AWAITED"
    )
    assert {*awaited} == {frameworks.kind(name).package.name for name in frameworks.NAMES} | {"subprocess"}
