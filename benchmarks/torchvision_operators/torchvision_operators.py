"""How does a script that somebody else wrote import torchvision beside PyTorch's CPU build?

Where the compiled part of torchvision does not load, its import fails with `operator torchvision::nms does not exist`
although hardly a script needs the operator. This folder on `PYTHONPATH` gives the names of the two operators a
meaning: PyTorch itself calls `define` at the end of `import torch`, because the metadata beside this file offers it
under PyTorch's entry points for backends. So nothing is shadowed (there is no `sitecustomize` here), nothing is
imported earlier than the script imports it, and a plain run, an expert's, a run of flatout, its trials and the
workers of loaders all read it in the same way. `benchmarks/sides.py` names the folder only where it is needed.
"""

from __future__ import annotations

from typing import Any

OPERATORS = ("nms", "qnms")

_kept: list[Any] = []
"""The names last as long as the library object."""


def define() -> None:
    """Define the operators, without an implementation; called by PyTorch once, when its import is over."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor a) -> Tensor")
    _kept.append(library)
