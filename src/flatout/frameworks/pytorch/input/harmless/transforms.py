"""Which transforms are torchvision's own, and what of the script's do they call?

In: a transform. Out: whether its code is torchvision's, and the functions and transforms that it was given.
"""

from __future__ import annotations

import enum
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.input.harmless.guards import Guards

_HOMES = ("torchvision.transforms.transforms", "torchvision.transforms.autoaugment", "torchvision.transforms.v2.")


def is_transform(kind: type) -> bool:
    """Whether a class is one of torchvision's transforms, all of its code torchvision's and PyTorch's."""
    home = kind.__module__
    if not home.startswith(_HOMES) or getattr(sys.modules.get(home), kind.__name__, None) is not kind:
        return False
    packages = tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in ("torchvision", "torch"))
    functions = (part for one in kind.__mro__[:-1] for part in vars(one).values())
    return all(
        part.__code__.co_filename.startswith(packages) for part in functions if isinstance(part, types.FunctionType)
    )


def is_chain(kind: type) -> bool:
    """Whether each part of such a transform is given what the one before it gives."""
    return kind.__name__ in ("Compose", "Sequential")


@dataclass(frozen=True, slots=True)
class MadeTransform:
    """A transform that the item's code makes itself.

    Attributes:
        kind: Its class.
        parts: What it was given that it may call.
        in_place: Whether it may change what it gets.
    """

    kind: type
    parts: list[Any]
    in_place: bool


def parts_of(transform: Any, guards: Guards) -> Iterator[Any]:
    """What a transform calls that it was given."""
    for method in ("forward", "__call__"):
        guards.name(vars(transform), method)
    for name, value in {**vars(transform), **getattr(transform, "_modules", {})}.items():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        if name in vars(transform):
            guards.name(vars(transform), name, value)
        if isinstance(value, torch.nn.ModuleList):
            value = list(value._modules.values())
        elif isinstance(value, list):
            guards.elements(value)
        for part in value if isinstance(value, list | tuple) else (value,):
            if callable(part) and not isinstance(part, type | enum.Enum):
                yield part
