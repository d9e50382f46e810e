"""Which version of a framework is installed here? As the framework itself says it, and without importing it.

A package's metadata says less: PyTorch's usual wheels are `2.13.0` there and `2.13.0+cu130` in `torch.__version__`,
which is what a trace and a plan record. In: the framework as a package. Out: its version.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
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


def version_of(package: Package) -> str:
    """The installed version, e.g. `2.13.0+cpu`; `unknown` where it does not say.

    Raises:
        MachineError: It is not installed.
    """
    found = importlib.util.find_spec(package.name)
    if found is None:
        raise not_installed(package)
    for folder in found.submodule_search_locations or ():
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            for line in ast.parse((Path(folder) / "version.py").read_text(encoding="utf-8")).body:
                match line:
                    case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                        return version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package.name)
    return "unknown"


def not_installed(package: Package) -> MachineError:
    """The error that says so."""
    return MachineError(
        f"`{package.name}` is not installed",
        cause=f"`{sys.executable}` does not find it, and ceilings are measured with the framework that trains",
        hint=f"`pip install {package.name}` into that environment",
    )
