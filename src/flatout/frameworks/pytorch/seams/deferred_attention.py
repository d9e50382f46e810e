"""How is attention that a script writes by hand recognised while it runs, and computed as one operation?

A product that may be the scores of attention is not computed at once. A `Deferred` stands in for it and notes the
scaling, mask and softmax that follow; their product with the values is then `scaled_dot_product_attention`. Whatever
else is done with it first computes what was put off, as the script wrote it, and from then on that line of the script
is computed at once. In: calls of `torch.matmul` and the like while it is on. Out: the same numbers within rounding.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from flatout.frameworks.pytorch.seams.backward_threads import trains
from flatout.frameworks.pytorch.seams.patches import Patch, remove_all

HIDES = -1e4
"""A score of this or less has no weight beside another one: what float16 scripts take for minus infinity."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
Of: Any = torch.Tensor  # its descriptors are not known to type checkers

ASKED = frozenset(
    [getattr(Of, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda")]
    + [getattr(Of, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__", "__hash__")]
)
"""What is known without computing."""

State = tuple[bool, bool, torch.dtype]
"""Whether gradients are taken, whether autocast is on, and to which type."""

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class NotDeferred(RuntimeError):
    """What was put off cannot be computed as the script wrote it any more: its call is made again without us."""


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """One operation that was put off, and what is known of the scores or weights that it gives."""

    owner: DeferredProducts
    line: tuple[Any, int]
    query: torch.Tensor
    key: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None  # added to scores or, of type bool, true where they are replaced by `fill`
    fill: float = 0.0
    are_weights: bool = False
    dtype: torch.dtype
    state: State
    func: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    before: Step | None = None
    at: int = 0  # where its result stands among the arguments
    versions: list[int]
    value: torch.Tensor | None = None
    version: int = 0

    def is_untouched(self) -> bool:
        """Whether nothing was read of what led to it, or changed in place."""
        untouched = self.value is None and versions_of(self.args) == self.versions
        return untouched and (self.before is None or self.before.is_untouched())

    def computed(self) -> torch.Tensor:
        """Its result, under the state in which the script asked for it."""
        if self.value is None:
            args, before = list(self.args), self.before
            if before is not None:
                args[self.at] = before.computed()
            if versions_of(self.args) != self.versions or (before and before.version != args[self.at]._version):
                raise NotDeferred("what attention is computed from was changed in place meanwhile")
            gradients, casts, dtype = self.state
            with torch.set_grad_enabled(gradients), torch.autocast(self.query.device.type, dtype, casts):
                self.value = self.func(*args)
            self.version = self.value._version
        return self.value

    def deferred(self) -> Deferred:
        """What stands in for it."""
        shape, make = (*self.query.shape[:-1], self.key.shape[-2]), Of._make_wrapper_subclass
        made: Deferred = make(Deferred, shape, dtype=self.dtype, device=self.query.device)
        made.step = self
        return made


class Deferred(torch.Tensor):
    """Stands in for scores or weights: knows its shape and type, and computes the rest when it is asked."""

    step: Step

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what belongs to attention; anything else gets the numbers."""
        kwargs = kwargs or {}
        if func in ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = str(getattr(func, "__name__", func))
        if (out := _noted(func, name, args, kwargs)) is not None:
            return out
        args, kwargs = tree_map_only(Deferred, partial(_numbers, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:  # type: ignore[override]
        """Something took it past `__torch_function__`, where its gradients would be lost."""
        raise NotDeferred(f"`{func}` was given scores of attention that are not computed yet")


class DeferredProducts:
    """Products of two activations are put off while `on`, in the thread that trains."""

    def __init__(self, thread: int) -> None:
        self.on = False
        self.num_fused = 0
        self.reasons: dict[tuple[Any, int], str] = {}
        """By code and instruction: why its product is computed at once; empty where it does not look like attention."""
        self._thread = thread
        holders: list[tuple[Any, str]] = [(torch.Tensor, name) for name in ("__matmul__", "matmul", "bmm")]
        holders += [(torch, "matmul"), (torch, "bmm"), (torch._VF, "einsum")]
        self._patches = [Patch(holder, name, self._product) for holder, name in holders]

    def remove(self) -> None:
        """Take the patches off; what was put off is computed when somebody asks."""
        remove_all(self._patches)

    def _product(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        @wraps(original)
        def product(*args: Any, **kwargs: Any) -> Any:
            out = None
            if self.on and patch.active and len(args) == 2 and not kwargs and not torch.compiler.is_compiling():
                if type(args[0]) is not str:
                    out = self._scores(original, args, sys._getframe(1))
                elif len(args[1]) == 2:  # called by `torch.einsum`
                    out = self._scores(torch.functional.einsum, (args[0], *args[1]), sys._getframe(2))
            return original(*args, **kwargs) if out is None else out

        return product

    def _scores(self, func: Any, args: tuple[Any, ...], frame: Any) -> Deferred | None:
        query, key = args[-2:]
        if type(query) not in PLAIN or type(key) not in PLAIN or query.dim() not in ORDERS:
            return None
        line = frame.f_code, frame.f_lasti
        if line in self.reasons or not trains(self._thread):
            return None
        orders = orders_of(args[0]) if len(args) == 3 else ORDERS[query.dim()]
        if orders is None or [query.dim(), key.dim()] != [len(orders[0])] * 2 or orders[2] != sorted(orders[2]):
            return None
        query, key = query.permute(orders[0]), key.permute(orders[1])
        alike = query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1]
        usual = query.is_floating_point() and query.layout is torch.strided and query.device == key.device
        if not alike or not usual or query.is_inference() or key.is_inference():
            return None
        state = state_of(query.device.type)
        return Step(
            owner=self, line=line, query=query, key=key, state=state, func=func, args=args,
            dtype=_type(torch.mm, query.dtype, query.device.type, state), versions=versions_of(args),
        ).deferred()  # fmt: skip


def versions_of(args: tuple[Any, ...]) -> list[int]:
    """How often each tensor among these was changed in place."""
    return [one._version for one in args if isinstance(one, torch.Tensor)]


def state_of(device: str) -> State:
    """As it is now."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@lru_cache
def _type(func: Any, dtype: torch.dtype, device: str, state: State) -> torch.dtype:
    """The type of a product's or a softmax's result, which autocast may decide."""
    small = torch.empty(1, 1, dtype=dtype, device=device)
    with torch.autocast(device, state[2], state[1]):
        return func(small, small if func is torch.mm else -1).dtype  # type: ignore[no-any-return]


def _numbers(name: str, asked: Deferred) -> torch.Tensor:
    """What was asked for, computed; that line of the script is put off no more."""
    step = asked.step
    gradient_lost = step.state[0] and not torch.is_grad_enabled()
    if gradient_lost and any(frame.f_code is _APPLY for frame, _ in traceback.walk_stack(None)):
        raise NotDeferred("a Function of the script's takes scores of attention, and would not pass their gradient on")
    why = "draws other random numbers when fused" if name == "dropout" else "needs scores or weights themselves"
    step.owner.reasons.setdefault(step.line, f"`{name}` {why}" if step.before or name in RULES else "")
    return step.computed()


def _noted(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is put off after this operation, or the product with the values; None where it is not attention."""
    at = 1 if name == "einsum" else 0
    asked, rule = args[at] if len(args) > at else None, RULES.get(name)
    if rule is None or not isinstance(asked, Deferred) or not asked.step.owner.on or asked.step.value is not None:
        return None
    step, others = asked.step, args[:at] + args[at + 1 :]
    plain = all(type(one) in PLAIN for one in others if isinstance(one, torch.Tensor))
    named = any(isinstance(one, torch.Tensor) for one in kwargs.values())
    if not plain or named or state_of(step.query.device.type) != step.state:
        return None
    found = rule(step, *others, **kwargs)
    if not isinstance(found, dict) or not found:
        return asked if found == {} else found
    args, func = (*args[:at], None, *args[at + 1 :]), partial(func, **kwargs) if kwargs else func
    new = replace(step, **found, func=func, args=args, at=at, before=step, versions=versions_of(args))
    if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        asked.step = new
        return asked
    return new.deferred()


def _number(value: Any) -> float | None:
    """A number, also where it is a tensor that can be read without waiting."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 and value.is_cpu and not value.requires_grad else None
    return float(value) if isinstance(value, int | float) else None


def _scaled(step: Step, factor: Any = None, *more: Any, by: int, **others: Any) -> Any:
    number = None if more or others or step.mask is not None or step.are_weights else _number(factor)
    return {"scale": step.scale * number**by} if number else None


def _filled(step: Step, mask: Any = None, value: Any = None) -> Any:
    fill = _number(value)
    fits = fill is not None and fill <= HIDES and _fits(step, mask) and mask.dtype is torch.bool
    return {"mask": mask, "fill": fill} if fits else None


def _added(step: Step, mask: Any = None, *more: Any, **others: Any) -> Any:
    fits = not more and not others and _fits(step, mask)
    return {"mask": mask} if fits and mask.dtype is step.dtype and not mask.requires_grad else None


def _fits(step: Step, mask: Any) -> bool:
    """Whether it is a first mask, and does not make the scores larger."""
    if not isinstance(mask, torch.Tensor) or step.mask is not None or step.are_weights:
        return False
    shape = (*step.query.shape[:-1], step.key.shape[-2])
    return torch.broadcast_shapes(mask.shape, shape) == shape


def _weighed(step: Step, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
    dtype = dtype or _type(torch.softmax, step.dtype, step.query.device.type, step.state)
    fits = not step.are_weights and dim in (-1, step.query.dim() - 1)
    return {"are_weights": True, "dtype": dtype} if fits else None


def _dropped(step: Step, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
    return None if p and training else {}


def _cast(step: Step, to: Any = None, *more: Any, **others: Any) -> Any:
    to, same = getattr(to, "dtype", to), getattr(to, "device", step.query.device) == step.query.device
    if more or others or not same or not isinstance(to, torch.dtype) or not to.is_floating_point:
        return None
    return {"dtype": to} if to is not step.dtype else {}


def _mixed(step: Step, first: Any = None, second: Any = None, *more: Any, **others: Any) -> torch.Tensor | None:
    """The product with the values, by letters where the first of the others is an equation."""
    value, orders = (first, ORDERS[step.query.dim()]) if second is None else (second, orders_of(first))
    if more or others or not isinstance(value, torch.Tensor) or orders is None or value.dim() != len(orders[1]):
        return None
    out = _attended(step, value.permute(orders[1]).mT) if orders[0] == [*range(step.query.dim())] else None
    return None if out is None else out.permute(orders[2])


def _attended(step: Step, value: torch.Tensor) -> torch.Tensor | None:
    """The fused operation; None where it does not compute the same, or something else has read a part of it."""
    query, key = step.query, step.key
    cast = step.state[1] or query.dtype is value.dtype is step.dtype
    fits = step.are_weights and cast and value.shape == (*key.shape[:-1], query.shape[-1])
    if not fits or not step.is_untouched():
        return None
    mask, causal, dead = _mask(step)
    query, key, four = (one[(None,) * (4 - one.dim())] for one in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, four, mask, is_causal=causal, scale=step.scale)
    out = out.view(*out.shape[4 - value.dim() :])
    step.owner.num_fused += 1
    return out if dead is None else torch.where(dead, value.mean(-2, keepdim=True).to(out.dtype), out)


def _mask(step: Step) -> tuple[torch.Tensor | None, bool, torch.Tensor | None]:
    """A mask of four dimensions, whether it is causal instead, and rows of which all weights are equal, if any.

    On a device nothing is read, for that would have to be waited for.
    """
    if (mask := step.mask) is None:
        return None, False, None
    rows, columns, replaces = step.query.shape[-2], step.key.shape[-2], mask.dtype is torch.bool
    if mask.is_cpu and mask.shape[-2:] == (rows, rows) == (rows, columns) and mask.numel() == rows * rows:
        square = mask.view(rows, rows)
        hidden, above = square if replaces else square <= HIDES, torch.ones(rows, rows, dtype=torch.bool).triu(1)
        if torch.equal(hidden, above) and (replaces or not square.tril().any()):
            return None, True, None
    dead = mask.all(-1, keepdim=True) if replaces and step.fill != -torch.inf else None
    if replaces:
        mask = ~mask if dead is None else ~mask | dead
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, rows, columns), False, dead


@lru_cache
def orders_of(equation: str) -> tuple[list[int], list[int], list[int]] | None:
    """How the arguments and the result of a batched product are permuted; None for another equation.

    Either argument to its batch, its row and what is summed over; the result from the batch and both rows.

    >>> orders_of("bqhd, bkhd -> bhqk")
    ([0, 2, 1, 3], [0, 2, 1, 3], [0, 1, 2, 3])
    """
    words = equation.replace(" ", "").replace("->", ",").split(",")
    if len(words) != 3 or not all(word.isalpha() and 2 < len(word) == len({*word}) < 5 for word in words):
        return None
    a, b, out = words
    batch, summed = sorted({*a} & {*b} & {*out}, key=out.index), [*{*a} & {*b} - {*out}]
    row, other = [*{*a} - {*b}], [*{*b} - {*a}]
    if [len(summed), len(row), len(other)] != [1, 1, 1] or {*batch, *row, *other} != {*out}:
        return None
    firsts, seconds = ([w.index(x) for x in (*batch, *own, *summed)] for w, own in ((a, row), (b, other)))
    return firsts, seconds, [[*batch, *row, *other].index(letter) for letter in out]


ORDERS = {3: orders_of("bij,bjk->bik"), 4: orders_of("abij,abjk->abik")}
"""Of `torch.matmul`, by the number of dimensions."""

RULES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "mul_", "__imul__"), partial(_scaled, by=1)),
    **dict.fromkeys(("div", "__truediv__", "div_", "__itruediv__"), partial(_scaled, by=-1)),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__"), _added),
    **{"softmax": _weighed, "dropout": _dropped, "float": lambda step: _cast(step, torch.float)},
    **dict.fromkeys(("to", "type", "type_as"), _cast),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "einsum"), _mixed),
}
"""By the operation's name: what is new of the scores or weights that it makes; None where it is not put off."""
