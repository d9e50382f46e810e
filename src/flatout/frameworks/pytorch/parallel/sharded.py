"""How can a parameter be a rank's part in memory, and whole to the script?

A `Sharded` tensor holds a part of a whole one; what Python asks of it is answered for the whole (`answers.py`). The
script's own objects become such tensors, so that whatever it keeps of them (lists, an average of parameters, an
optimizer's groups) stays true. In: a tensor and how it is cut. Out: the same object in the memory of its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.portions import Portions
from flatout.frameworks.pytorch.seams.trees import tensors_of


class Answering(torch.Tensor):
    """A tensor that stands for another one: what is asked of it is answered elsewhere."""

    answer: ClassVar[Callable[[Any, Any, Any], Any]]
    """Answers a function's call, with its arguments and those that are named."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The answer; the machinery by which the question came is off meanwhile."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            return cls.answer(func, args, kwargs or {})


class Sharded(Answering):
    """A rank's part of a tensor, whole to Python: see `answers.py`."""

    portions: Portions

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds the whole: it can be read without ranks."""
        return whole_of(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:  # type: ignore[override]
        """A copy is whole."""
        if id(self) not in memo:
            memo[id(self)] = whole_of(self)
        found: torch.Tensor = memo[id(self)]
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(whole_of(self))

    def __format__(self, spec: str) -> str:
        return format(whole_of(self), spec)


@dataclass(frozen=True, slots=True)
class Path:
    """By which views a copy came from a sharded tensor.

    Attributes:
        base: The tensor.
        steps: Functions with the rest of their arguments, and which of the results was taken.
    """

    base: Sharded
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int], ...]


class Copied(Answering):
    """What should be a view of a sharded tensor and is a copy: what is written into it goes where it came from.

    See `views.py`.
    """

    path: Path
    seen: int
    """Version of the tensor of which it is a copy."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        _become_plain(self)  # whose name it is to be shown with
        try:
            return repr(self)
        finally:
            self.__class__ = Copied


def become(tensor: torch.Tensor, portions: Portions, held: Any = None) -> Sharded:
    """Have a tensor, which holds this rank's part, be the whole one to Python; it stays the same object.

    Args:
        tensor: The part.
        portions: Which it is.
        held: What holds the memory of a parameter: told where it is to lie from now on (`moved`).
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = Sharded
    tensor.portions = portions  # type: ignore[attr-defined]
    if held is not None:
        tensor.held = held  # type: ignore[attr-defined]
    if is_parameter:  # PyTorch's own mark
        tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def _become_plain(tensor: Any) -> None:
    tensor.__class__ = torch.Tensor


def copied(found: Any, base: Sharded, steps: tuple[Any, ...]) -> None:
    """Mark the tensors that a view gave; the last of the steps is the one that gave them."""
    *before, (func, args, kwargs, _) = steps
    for place, tensor in enumerate(tensors_of(found)):
        tensor.__class__ = Copied
        tensor.seen = base._version  # type: ignore[attr-defined]
        tensor.path = Path(base, (*before, (func, args, kwargs, place)))  # type: ignore[attr-defined]


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part that is here, in the same memory, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def whole_of(tensor: Sharded) -> torch.Tensor:
    """The whole of a sharded tensor, gathered: a parameter where it is one. Every rank must ask for it."""
    with torch._C.DisableTorchFunctionSubclass():
        found = tensor.portions.gathered(tensor.detach())
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


class Gathered(torch.autograd.Function):
    """The whole of a sharded tensor; all ranks compute with it alike, so that each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, portions: Portions) -> torch.Tensor:
        """The whole."""
        ctx.portions = portions
        return portions.gathered(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """This rank's part."""
        return ctx.portions.mine(grad).contiguous(), None


def name_of(func: Any) -> str:
    """What a function of PyTorch's is called."""
    return str(getattr(func, "__name__", func))


def writes(func: Any) -> bool:
    """Whether it changes its first argument."""
    name = name_of(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
