"""Is code the script's own, and not PyTorch's, Python's or of an installed library?

In: a class, a function, a module or a frame. Out: yes or no; the innermost frame of the script's own.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from types import FrameType
from typing import Any

import torch

from flatout.guest.tracebacks import HERE

TORCH = os.path.dirname(torch.__file__) + os.sep
INSTALLED = (os.path.dirname(os.path.dirname(torch.__file__)) + os.sep, os.path.dirname(os.__file__) + os.sep)


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


def script_frame(frame: FrameType | None, *, on_device: bool) -> FrameType | None:
    """The frame of the script's own line.

    Where no line is the script's own, a library's stands for it. None where PyTorch's optimizer reads its own step
    counter, which lies on the host and is no doing of the script's.
    """
    nearest = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not on_device and name.startswith(TORCH + "optim"):
            return None
        if not name.startswith((TORCH, HERE)):
            nearest = nearest or frame
            if not name.startswith(INSTALLED):
                return frame
        frame = frame.f_back
    return nearest
