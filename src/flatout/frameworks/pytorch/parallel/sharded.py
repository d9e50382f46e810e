"""How can a parameter be a rank's part in memory, and whole to the script?

A `Sharded` tensor holds some rows of a whole one; what Python asks of it is answered for the whole (`answers.py`). The
script's own objects become such tensors, so that whatever it keeps of them (lists, an average of parameters, an
optimizer's groups) stays true. In: a tensor and how it is cut. Out: the same object in the memory of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

REPLICATE = "`--mode replicate` keeps whole parameters on every rank"


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """How a tensor is cut into rows, as `torch.chunk` does: each rank has `num` of them but for the last ones.

    Attributes:
        shape: Of the whole.
        group: The ranks that share its rows.
        refuse: Told of what cannot be done with a part; it ends the run.
    """

    shape: torch.Size
    group: Group
    refuse: Callable[[NotDivided], Any]

    @property
    def num(self) -> int:
        """Rows of a rank's part, but for those at the end."""
        return -(-self.shape[0] // self.group.world)

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's rows begin and end."""
        low = min(self.group.rank * self.num, self.shape[0])
        return low, min(low + self.num, self.shape[0])

    @property
    def part_shape(self) -> torch.Size:
        """Of this rank's part."""
        low, high = self.bounds
        return torch.Size((high - low, *self.shape[1:]))

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor, a view."""
        low, high = self.bounds
        return whole.narrow(0, low, high - low)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole from the parts of all ranks; every rank must ask for it."""
        padded = part.new_zeros((self.num, *self.shape[1:]))
        padded[: part.shape[0]] = part
        every = self.group.gather(padded, "gathering of a parameter")
        return every.flatten(0, 1)[: self.shape[0]].clone()


class Sharded(torch.Tensor):
    """A rank's rows of a tensor, whole to Python."""

    rows: Rows
    answer: ClassVar[Callable[[Any, Any, Any], Any]]
    """Answers a function's call for the whole: `answers.py`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is asked of the whole tensor."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            return cls.answer(func, args, kwargs or {})

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


class Copied(torch.Tensor):
    """What should be a view of a sharded tensor and is a copy: writing into it would be lost, and is refused."""

    rows: Rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As of any tensor, unless it is written to."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            if writes(func) and args and isinstance(args[0], cls):
                args[0].rows.refuse(
                    NotDivided(
                        "the script writes into a part of a parameter",
                        cause=f"`{name_of(func)}` on a view of it, and its rows lie on other ranks",
                        hint=REPLICATE,
                    )
                )
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        _become_plain(self)  # whose name it is to be shown with
        try:
            return repr(self)
        finally:
            self.__class__ = Copied


def become(tensor: torch.Tensor, rows: Rows) -> Sharded:
    """Have a tensor, which holds this rank's rows, be the whole one to Python; it stays the same object."""
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = Sharded
    tensor.rows = rows  # type: ignore[attr-defined]
    if is_parameter:  # PyTorch's own mark
        tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def _become_plain(tensor: Any) -> None:
    tensor.__class__ = torch.Tensor


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that are here, in the same memory, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def whole_of(tensor: Sharded) -> torch.Tensor:
    """The whole of a sharded tensor, gathered: a parameter where it is one. Every rank must ask for it."""
    with torch._C.DisableTorchFunctionSubclass():
        found = tensor.rows.gathered(tensor.detach())
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


class Gathered(torch.autograd.Function):
    """The whole of a sharded tensor; all ranks compute with it alike, so that each takes its rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The whole."""
        ctx.rows = rows
        return rows.gathered(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """This rank's rows."""
        return ctx.rows.mine(grad).contiguous(), None


def name_of(func: Any) -> str:
    """What a function of PyTorch's is called."""
    return str(getattr(func, "__name__", func))


def writes(func: Any) -> bool:
    """Whether it changes its first argument."""
    name = name_of(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
