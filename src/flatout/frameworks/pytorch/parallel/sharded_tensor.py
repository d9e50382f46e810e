"""How can a parameter be a rank's part in memory, and whole to the script?

A `Sharded` tensor holds a part of a whole one; what Python asks of it is answered for the whole (`torch_function.py`).
The script's own objects become such tensors, so that whatever it keeps of them (lists, an average of parameters, an
optimizer's groups) stays true. In: a tensor and how it is cut. Out: the same object in the memory of its part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.seams.backward_threads import in_backward
from flatout.frameworks.pytorch.seams.trees import tensors_of

REPLICATE = "`--mode replicate` keeps whole parameters on every rank"


def chunked(size: int, world: int) -> tuple[int, ...]:
    """Where the pieces begin and end that `torch.chunk` makes.

    >>> chunked(10, 4), chunked(2, 3)
    ((0, 3, 6, 9, 10), (0, 1, 2, 2))
    """
    each = -(-size // world)
    return tuple(min(each * rank, size) for rank in range(world + 1))


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """How a tensor of some shape is cut over the ranks of a group."""

    shape: torch.Size
    group: Group
    refuse: Callable[[NotDivided], Any]
    """Told of what cannot be done with a part; it ends the run."""
    edges: tuple[int, ...]
    """Where each rank's piece begins within a block, and where the last one's ends."""
    number: int = 0
    """Of the parameter, the same on all ranks: what they ask for in one exchange is compared."""
    dim: int = 0
    blocks: int = 1
    """So many equal blocks make up the dimension that is cut."""

    @property
    def part_shape(self) -> torch.Size:
        """Of this rank's part."""
        size = self.blocks * self._size(self.group.rank)
        return torch.Size((*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]))

    def is_alike(self, other: Placement) -> bool:
        """Whether parts of two tensors go together, element by element."""
        mine, others = ((p.shape, p.edges, p.dim, p.blocks, p.group.ranks) for p in (self, other))
        return mine == others

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor: a view where there is one."""
        low, size = self.edges[self.group.rank], self._size(self.group.rank)
        if self.blocks == 1:
            return whole.narrow(self.dim, low, size)
        blocks = whole.unflatten(self.dim, (self.blocks, -1)).narrow(self.dim + 1, low, size)
        return blocks.flatten(self.dim, self.dim + 1)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole from the parts of all ranks; every rank must ask for it, at the same time."""
        group, name = self.group, "gathering of a parameter"
        if threading.current_thread() is not threading.main_thread() and not in_backward():
            problem = NotDivided(
                "a thread of the script's asks for a sharded parameter",
                cause="all ranks gather it together, and threads do not come in the same order everywhere",
                hint="copy what a thread is to save to whole tensors before (`copy.deepcopy`); or " + REPLICATE,
            )
            self.refuse(problem)
        self.compare(group.gather(torch.tensor([self.number, self.shape.numel()], device=part.device), name))
        owners = [rank for rank in range(group.world) if self._size(rank)]
        if len(owners) == 1 < group.world:  # one rank has all of it
            whole = part.detach().clone() if owners[0] == group.rank else part.new_empty(self.shape)
            return group.broadcast(whole.contiguous(), name, source=owners[0])
        pieces = part.unflatten(self.dim, (self.blocks, part.shape[self.dim] // self.blocks))
        return group.joined(pieces, self.edges, self.dim + 1, name).flatten(self.dim, self.dim + 1)

    def compare(self, tags: torch.Tensor) -> None:
        """Make sure that all ranks have asked for the same."""
        if not bool((tags == tags[0]).all()):
            problem = NotDivided(
                "ranks ask for different parameters at the same time",
                cause="the script goes through them in an order that depends on the process (a set, the time)",
                hint=REPLICATE,
            )
            self.refuse(problem)

    def _size(self, rank: int) -> int:
        return self.edges[rank + 1] - self.edges[rank]


def in_rows(shape: Sequence[int], group: Group, refuse: Callable[[NotDivided], Any], number: int = 0) -> Placement:
    """Cut along the first dimension, as `torch.chunk` does."""
    return Placement(torch.Size(shape), group, refuse, chunked(shape[0], group.world), number)


def can_be_cut(parameter: torch.Tensor) -> bool:
    """Whether a rank may hold a part of it; others are whole on every rank."""
    return bool(parameter.dim() and parameter.numel()) and parameter.is_contiguous() and parameter.is_floating_point()


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

    def plain(self) -> torch.Tensor:
        """A tensor of its own that is what this one stands for."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds a plain tensor: it can be read without ranks."""
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:  # type: ignore[override]
        """A copy is plain."""
        if id(self) not in memo:
            memo[id(self)] = self.plain()
        found: torch.Tensor = memo[id(self)]
        return found


class Sharded(Answering):
    """A rank's part of a tensor, whole to Python: see `torch_function.py`."""

    placement: Placement
    origin: Sharded | None = None
    """Of what tensor it is the `.data`."""

    def plain(self) -> torch.Tensor:
        """The whole."""
        return whole_of(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(whole_of(self))

    def __format__(self, spec: str) -> str:
        return format(whole_of(self), spec)


class Copied(Answering):
    """What should be a view of a sharded tensor and is a copy: it may be read while that has not changed."""

    base: Sharded
    seen: int
    """Version of the tensor of which it is a copy."""

    def plain(self) -> torch.Tensor:
        """The copy."""
        return part_of(self).clone()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        it: Any = self
        it.__class__ = torch.Tensor  # whose name it is to be shown with
        try:
            return repr(self)
        finally:
            it.__class__ = Copied


def become(tensor: torch.Tensor, placement: Placement, moved: Any = None) -> Sharded:
    """Have a tensor, which holds this rank's part, be the whole one to Python; it stays the same object.

    `moved` has a parameter's new part, where it lies elsewhere from now on.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = Sharded
    tensor.placement = placement  # type: ignore[attr-defined]
    if moved is not None:
        tensor.moved = moved  # type: ignore[attr-defined]
    if is_parameter:  # PyTorch's own mark
        tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def copied(found: Any, base: Sharded) -> None:
    """Mark the tensors that a view gave."""
    for tensor in tensors_of(found):
        tensor.__class__ = Copied
        tensor.base, tensor.seen = base, version_of(base)  # type: ignore[attr-defined]


def version_of(tensor: Sharded) -> int:
    """How often it was written to, by the names under which that is counted."""
    own = int(tensor._version)
    return own if tensor.origin is None else own + version_of(tensor.origin)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part that is here, in the same memory, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def whole_of(tensor: Sharded) -> torch.Tensor:
    """The whole of a sharded tensor, gathered: a parameter where it is one. Every rank must ask for it."""
    with torch._C.DisableTorchFunctionSubclass():
        found = tensor.placement.gathered(tensor.detach())
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


class Gathered(torch.autograd.Function):
    """The whole of a sharded tensor; all ranks compute with it alike, so that each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, placement: Placement) -> torch.Tensor:
        """The whole."""
        ctx.placement = placement
        return placement.gathered(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """This rank's part."""
        return ctx.placement.mine(grad).contiguous(), None


def name_of(func: Any) -> str:
    """What a function of PyTorch's is called."""
    return str(getattr(func, "__name__", func))


def writes(func: Any) -> bool:
    """Whether it changes its first argument."""
    name = name_of(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
