"""Which line of the script does something happen at? The innermost frame that belongs to neither PyTorch nor a library.

In: a frame. Out: the script's own frame above it. Loaded in trials only.
"""

from __future__ import annotations

import os
from types import FrameType

import torch

from flatout.guest.tracebacks import HERE

TORCH = os.path.dirname(torch.__file__) + os.sep
INSTALLED = (os.path.dirname(os.path.dirname(torch.__file__)) + os.sep, os.path.dirname(os.__file__) + os.sep)


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
