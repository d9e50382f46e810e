"""Which of torchvision's transforms are known, of both its versions?

A transform of version 2 is a module around a function that is found by the type of what it is given. In: transforms.
Out: how each is done for many images, and how a chain of them is read.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from flatout.frameworks.pytorch.input.items import images
from flatout.frameworks.pytorch.input.items.rows import Rows

OLD, NEW = "torchvision.transforms.transforms", "torchvision.transforms.v2"


@dataclass(frozen=True, slots=True)
class Transform:
    """How one of torchvision's transforms is done for many images.

    Attributes:
        rows: What is called with the transform and the images.
        fresh: Whether the result is always in memory of its own.
        spending: The same in the memory of the images.
        attributes: What its result depends on beside the images.
    """

    rows: Callable[..., Rows]
    fresh: bool = False
    spending: Callable[..., Rows] | None = None
    attributes: tuple[str, ...] = ()


_NORMALIZE = Transform(
    images.normalize, fresh=True, spending=partial(images.normalize, in_place=True),
    attributes=("mean", "std", "inplace"),
)  # fmt: skip

TRANSFORMS: dict[str, dict[str, Transform]] = {
    OLD: {
        "ToTensor": Transform(images.to_tensor, fresh=True),
        "PILToTensor": Transform(images.pil_to_tensor),
        "Normalize": _NORMALIZE,
    },
    NEW: {
        "ToTensor": Transform(images.to_tensor, fresh=True),
        "PILToTensor": Transform(images.pil_to_tensor),
        "ToImage": Transform(images.to_image),
        "ToDtype": Transform(images.to_dtype, attributes=("dtype", "scale")),
        "ToPureTensor": Transform(images.to_pure_tensor),
        "Normalize": _NORMALIZE,
    },
}
"""By the module that they are imported from, and the name of the class."""


def home_of(kind: type) -> str | None:
    """The module that a class of torchvision's transforms is imported from; None for any other class."""
    if not kind.__module__.startswith("torchvision.transforms."):
        return None
    home = NEW if kind.__module__.startswith(NEW + ".") else OLD
    return home if getattr(sys.modules.get(home), kind.__name__, None) is kind else None


def known(transform: Any) -> Transform | None:
    """How a transform is done for many images, where it is known."""
    kind = type(transform)
    home = home_of(kind)
    return None if home is None else TRANSFORMS[home].get(kind.__name__)


def as_read(value: Any) -> types.FunctionType | None:
    """A function that does what a chain of version 2 does with one image, to be read in its place."""
    chain = getattr(sys.modules.get(NEW), "Compose", None)
    return cast("types.FunctionType", _one_after_another) if type(value) is chain else None


def _one_after_another(self: Any, image: Any) -> Any:
    for transform in self.transforms:
        image = transform(image)
    return image
