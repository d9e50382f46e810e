"""How many lines does a library ask a script to write, for one workload?

In: the drivers. Out: the statements that a workload needs of its driver and that plain's does not have: imports, and
functions and classes that are reached from the one that makes the loader, and from the one that makes the library's
own format. Docstrings, and what is only there for the comparison of pixels, do not count.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOTS = {
    "litdata": {
        "mnist": ("written", "digit"), "photographs": ("written", "photograph"),
        "tokens": ("written", "window"), "tensors": ("written", "number"),
    },
    "webdataset": {
        "mnist": ("written", "digits"), "photographs": ("written", "jpegs"),
        "tokens": ("written", "windows"), "tensors": ("written", "numbers"),
    },
}  # fmt: skip
"""What makes a format."""

OURS = {"contract", "__future__", "typing", "collections.abc"}
Definition = ast.FunctionDef | ast.ClassDef


def edit_lines(library: str, workload: str) -> int:
    """Statements that a script has to have beyond plain's."""
    if library == "flatout":
        return 0
    return len(_statements(library, workload) - _statements("plain", workload))


def _statements(library: str, workload: str) -> set[str]:
    path = Path(__file__).resolve().parent / f"with_{library}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    defined = {node.name: node for node in body if isinstance(node, Definition)}
    todo = [name for name in (workload, "loader") if name in defined][:1]
    todo += ROOTS.get(library, {}).get(workload, ())
    reached: set[str] = set()
    names: set[str] = set()
    while todo:
        name = todo.pop()
        if name in reached or (ast.get_docstring(defined[name]) or "").startswith("Not of the script"):
            continue
        reached.add(name)
        used = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        names |= used
        todo += [name for name in used if name in defined]
    statements = {f"{name}: {line}" for name in reached for line in _lines(defined[name])}
    return statements | {ast.unparse(node) for node in body if _imports(node, names)}


def _imports(node: ast.stmt, names: set[str]) -> bool:
    if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "module", "") in OURS:
        return False
    return any((alias.asname or alias.name).partition(".")[0] in names for alias in node.names)


def _lines(definition: Definition) -> list[str]:
    """Its lines, a statement on each, without docstrings."""
    for node in ast.walk(definition):
        if isinstance(node, Definition) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [line.strip() for line in ast.unparse(definition).splitlines() if line.strip()]
