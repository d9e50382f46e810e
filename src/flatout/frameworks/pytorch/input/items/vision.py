"""Which of torchvision's transforms are known, of both its versions, and has somebody changed what they run?

A transform of version 2 is a module around a function that is found by the type of what it is given. In: transforms.
Out: how each is done for many images, what code it runs, and how a chain of them is read.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.modules import module as _modules

from flatout.frameworks.pytorch.input.items import images
from flatout.frameworks.pytorch.input.items.rows import Rows

OLD, NEW = "torchvision.transforms.transforms", "torchvision.transforms.v2"

_METHODS = frozenset(("forward", "__call__", "transform", "make_params", "check_inputs", "_call_kernel",
                      "_needs_transform_list", "_transformed_types"))  # fmt: skip
"""What a transform of version 2 runs of its class, unless somebody has replaced it in the transform itself."""

_FOR_TENSORS = ("to_dtype", "normalize")
"""Functions that it calls, and that choose a kernel by the type of what they are given: tensors here."""

_FOR_PIL = ("horizontal_flip", "vertical_flip", "pad", "crop", "query_size")
"""The same for PIL's images."""

_FUNCTIONS = ("to_image", "pil_to_tensor", "to_dtype_image", "normalize_image", *_FOR_TENSORS, *_FOR_PIL)
"""All functions that it calls."""


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
    """How a transform is done for many images, where it is known; whether it was changed is another question."""
    kind = type(transform)
    home = home_of(kind)
    return None if home is None else TRANSFORMS[home].get(kind.__name__)


def code_of(kind: type) -> tuple[Any, ...]:
    """What a transform of torchvision's runs."""
    if not kind.__module__.startswith(NEW + "."):
        own, names = kind.__dict__.get, vars(sys.modules["torchvision.transforms.functional"]).get
        return own("__call__"), own("forward"), names("to_tensor"), names("pil_to_tensor"), names("normalize")
    names, old = vars(sys.modules[f"{NEW}.functional"]).get, vars(sys.modules["torchvision.transforms.functional"]).get
    functions = [names(name) for name in _FUNCTIONS]
    kernels = [_kernels(names(name)) for name in _FOR_TENSORS]
    returned = sys.modules["torchvision.tv_tensors._torch_function_helpers"]._TORCHFUNCTION_SUBCLASS
    return (
        *[getattr(kind, name, None) for name in _METHODS], *functions, *kernels,
        old("to_tensor"), old("pil_to_tensor"), returned,
    )  # fmt: skip


def _kernels(function: Any) -> tuple[Any, ...]:
    """What a function of version 2 calls for tensors, and for images that are tensors."""
    registry = sys.modules[f"{NEW}.functional._utils"]._KERNEL_REGISTRY.get(function, {})
    return registry.get(torch.Tensor), registry.get(images.image_tensor())


def kernels_for_pil() -> list[Any]:
    """What functions of version 2 call for PIL's images."""
    functions, image = vars(sys.modules[f"{NEW}.functional"]), sys.modules["PIL.Image"].Image
    kernels = sys.modules[f"{NEW}.functional._utils"]._KERNEL_REGISTRY
    return [kernels.get(functions.get(name), {}).get(image) for name in _FOR_PIL]


def is_touched(transform: Any) -> bool:
    """Whether somebody has hooked something to a transform, or to all modules, or has compiled it."""
    if not isinstance(transform, torch.nn.Module):
        return "__call__" in vars(transform)
    hooks = (transform._forward_hooks, transform._forward_pre_hooks, _modules._global_forward_hooks,
             _modules._global_forward_pre_hooks)  # fmt: skip
    return not _METHODS.isdisjoint(vars(transform)) or any(hooks) or transform._compiled_call_impl is not None


def holds(kind: type) -> Callable[[Any], bool]:
    """What tells whether a transform of this class runs what it runs now."""
    code = code_of(kind)
    return lambda transform: code_of(kind) == code and not is_touched(transform)


def as_read(value: Any) -> types.FunctionType | None:
    """A function that does what a chain of version 2 does with one image, to be read in its place."""
    chain = getattr(sys.modules.get(NEW), "Compose", None)
    return cast("types.FunctionType", _one_after_another) if type(value) is chain and not is_touched(value) else None


def _one_after_another(self: Any, image: Any) -> Any:
    for transform in self.transforms:
        image = transform(image)
    return image
