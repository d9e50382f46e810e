"""How is torchvision imported beside PyTorch's CPU build?

In: nothing. Out: the package, with stand-ins for two compiled operators that do not load there.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import torch


def torchvision() -> Any:
    """The package; beside PyTorch's CPU build its compiled operators do not load, and none of them is needed."""
    with contextlib.suppress(RuntimeError):  # `operator torchvision::nms does not exist`
        return importlib.import_module("torchvision")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor a) -> Tensor")
    torch._flatout_benchmark_library = library  # its names last as long as the object
    return importlib.import_module("torchvision")
