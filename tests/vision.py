"""torchvision for tests: beside PyTorch's CPU build its compiled operators do not load, and none of them is needed."""

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")

_kept = []
"""What defines the operators' names, which lasts as long as the object."""


def torchvision():
    """The package; a skip where it is not installed."""
    try:
        return importlib.import_module("torchvision")
    except ImportError as problem:
        pytest.skip(f"needs torchvision: {problem}", allow_module_level=True)
    except RuntimeError:  # `operator torchvision::nms does not exist`
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor a) -> Tensor")
        _kept.append(library)
        return importlib.import_module("torchvision")
