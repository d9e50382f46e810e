"""Which files of the user's is a script made of?

In: a `Script`. Out: its file and what that imports from beside it, and one hash of all of them. Read from the source's
import statements; nothing is run. What lies elsewhere (installed packages, `PYTHONPATH`) and what is imported under a
computed name is not seen.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

from flatout.run.script import Script

MOST_FILES = 500
"""Of a larger project the first so many, breadth first: reading one takes some milliseconds."""


def main_file(script: Script) -> Path:
    """The file that is run; of a module the one in the working folder, of a folder the one in it that is run."""
    if script.module is None:
        path = Path(script.path or "")
        return path / "__main__.py" if path.is_dir() else path
    path = Path(*script.module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


def files(script: Script) -> list[Path]:
    """The script's file first, then what it imports from its own folder (a module: the working folder), and so on."""
    main = main_file(script)
    root = main.parent if script.module is None else Path()
    found = dict.fromkeys([main, *_packages(root, script.module or "")])
    todo = list(found)
    while todo and len(found) < MOST_FILES:
        file = todo.pop(0)
        new = [path for path in _imported(file, root) if path not in found]
        found |= dict.fromkeys(new)
        todo += dict.fromkeys(new)
    return list(found)


def hash_of(script: Script) -> str:
    """A hash of these files' names and contents; of what cannot be read, of the name alone."""
    digest = hashlib.sha256()
    for path in files(script):
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        digest.update(f"{path.name} {len(content)} ".encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()[:16]


def _imported(file: Path, root: Path) -> Iterator[Path]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in strings, which Python says when it runs
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # not ours to say: Python does when it gets there
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _packages(root, name.name)
        elif isinstance(node, ast.ImportFrom):
            above = list(file.parents)[: node.level]
            base = above[-1] if above else root
            yield from _packages(base, node.module or "")
            for name in node.names:
                yield from _packages(base, ".".join(filter(None, (node.module, name.name))))


def _packages(root: Path, module: str) -> Iterator[Path]:
    """The files that importing `a.b.c` runs, as far as they lie below `root`."""
    path = root
    for part in filter(None, module.split(".")):
        path = path / part
        for file in (path / "__init__.py", path.with_name(f"{part}.py")):
            if file.is_file():
                yield file
