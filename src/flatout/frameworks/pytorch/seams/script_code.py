"""Is code the script's own, and not Python's or of an installed library?

In: a class, a function or a module. Out: yes or no.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any


def is_the_scripts(thing: Any) -> bool:
    """Whether a class, a function or a module is the script's own."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return name == "__main__" or _is_own_module(str(name))


@functools.lru_cache(maxsize=1024)
def _is_own_module(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or "-packages"
    return "-packages" not in file  # neither `site-packages` nor `dist-packages`
