"""Which version of a framework is installed here? As the framework itself says it, and without importing it.

A package's metadata says less: PyTorch's usual wheels are `2.13.0` there and `2.13.0+cu130` in `torch.__version__`,
which is what a trace and a plan record. In: the framework's name. Out: its version.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from flatout.errors import MachineError

PACKAGES = {"pytorch": "torch"}
"""Frameworks that can be measured, each with the package that it is."""

_LOCATE = """
import importlib.util, json, sys
found = importlib.util.find_spec(sys.argv[1])
print(json.dumps(found and list(found.submodule_search_locations or ())))
"""


def framework_version(framework: str, python: str = sys.executable) -> str:
    """The installed version, e.g. `2.13.0+cpu`; `unknown` where it does not say.

    Raises:
        MachineError: It is not installed for that interpreter.
    """
    package = PACKAGES[framework]
    folders = _folders(package) if python == sys.executable else _folders_for(python, package)
    if folders is None:
        raise not_installed(framework, python)
    for folder in folders:
        if (version := _assigned(Path(folder) / "version.py")) is not None:
            return version
    try:
        return importlib.metadata.version(package) if python == sys.executable else "unknown"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def not_installed(framework: str, python: str) -> MachineError:
    """The error that says so."""
    package = PACKAGES[framework]
    return MachineError(
        f"`{package}` is not installed",
        cause=f"`{python}` does not find it, and ceilings are measured with the framework that trains",
        hint=f"`pip install {package}` into that environment",
    )


def _folders(package: str) -> list[str] | None:
    """Where a package lies; None where it is not there."""
    found = importlib.util.find_spec(package)
    return None if found is None else list(found.submodule_search_locations or ())


def _folders_for(python: str, package: str) -> list[str] | None:
    """The same, as another interpreter finds it."""
    try:
        asked = subprocess.run([python, "-c", _LOCATE, package], capture_output=True, text=True, timeout=30, check=True)
        found: list[str] | None = json.loads(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return found


def _assigned(path: Path) -> str | None:
    """The text that a file assigns to `__version__`."""
    try:
        lines = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    for line in lines:
        match line:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                return version
            case _:
                continue
    return None
