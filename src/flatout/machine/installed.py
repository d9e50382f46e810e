"""Which version of a framework is installed here? As the framework itself says it, and without importing it.

A package's metadata says less: PyTorch's usual wheels are `2.13.0` there and `2.13.0+cu130` in `torch.__version__`,
which is what a trace and a plan record. In: the framework as a package. Out: its version.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import MachineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A framework as a package that can be installed and measured.

    Attributes:
        framework: Its name in records, e.g. `pytorch`.
        name: What is imported and installed, e.g. `torch`.
        calibration: The program that measures this machine's ceilings with it.
        exchange_calibration: The program that measures exchanges between ranks; None where it has none.
    """

    framework: str
    name: str
    calibration: Path
    exchange_calibration: Path | None = None


_LOCATE = """
import importlib.util, json, sys
found = importlib.util.find_spec(sys.argv[1])
print(json.dumps(found and list(found.submodule_search_locations or ())))
"""


def version_of(package: Package, python: str = sys.executable) -> str:
    """The installed version, e.g. `2.13.0+cpu`; `unknown` where it does not say.

    Raises:
        MachineError: It is not installed for that interpreter.
    """
    folders = _folders(package.name) if python == sys.executable else _folders_for(python, package.name)
    if folders is None:
        raise not_installed(package, python)
    for folder in folders:
        if (version := _assigned(Path(folder) / "version.py")) is not None:
            return version
    try:
        return importlib.metadata.version(package.name) if python == sys.executable else "unknown"
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def not_installed(package: Package, python: str) -> MachineError:
    """The error that says so."""
    return MachineError(
        f"`{package.name}` is not installed",
        cause=f"`{python}` does not find it, and ceilings are measured with the framework that trains",
        hint=f"`pip install {package.name}` into that environment",
    )


def _folders(name: str) -> list[str] | None:
    """Where a package lies; None where it is not there."""
    found = importlib.util.find_spec(name)
    return None if found is None else list(found.submodule_search_locations or ())


def _folders_for(python: str, name: str) -> list[str] | None:
    """The same, as another interpreter finds it."""
    try:
        asked = subprocess.run([python, "-c", _LOCATE, name], capture_output=True, text=True, timeout=30, check=True)
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
