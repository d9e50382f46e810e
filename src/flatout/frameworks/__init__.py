"""Which frameworks are there? What differs between them lies behind one contract, `flatout.frameworks.contract`.

In: a framework's name, or the module whose import shows that a script uses it. Out: its `Kind`, read without loading
the framework. A new framework is one package here, with a `KIND`, and its name in `NAMES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.frameworks.contract import FrameworkSpec

NAMES = ("pytorch",)
"""In records and as packages; the first is what a script is taken to use until its process says."""


def kind(name: str = NAMES[0]) -> FrameworkSpec:
    """The framework of that name.

    >>> kind().label
    'PyTorch'

    Raises:
        ValueError: There is none.
    """
    if name not in NAMES:
        raise ValueError(f"no framework is named {name!r}")
    found: FrameworkSpec = import_module(f"{__name__}.{name}").KIND
    return found


def kind_of_module(module: str) -> FrameworkSpec:
    """The framework that is imported as `module`.

    >>> kind_of_module("torch").package.framework
    'pytorch'

    Raises:
        ValueError: There is none.
    """
    for one in map(kind, NAMES):
        if one.package.name == module:
            return one
    raise ValueError(f"no framework is imported as {module!r}")
