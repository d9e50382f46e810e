"""How is attention that a script writes by hand recognised while it runs, and computed as one operation?

A product that may be the scores of attention is not computed at once. A `Deferred` stands in for it and notes the
scaling, mask and softmax that follow; their product with the values is then `scaled_dot_product_attention`. Whatever
else is done with it first computes what was put off, as the script wrote it, and from then on that line of the script
is computed at once. In: calls of `torch.matmul` and the like while it is on. Out: the same numbers within rounding.
"""

from __future__ import annotations

import sys
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


class NotDeferred(RuntimeError):
    """What was put off cannot be computed as the script wrote it any more: its call is made again without us."""


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """One operation that was put off, and what is known of the scores or weights that it gives."""

    owner: DeferredProducts
    line: tuple[Any, int]
    """Where the script makes the product: code and instruction."""
    query: torch.Tensor
    key: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None
    """What is added to the scores, or, of type bool, where they are replaced by `fill`."""
    fill: float = 0.0
    are_weights: bool = False
    dtype: torch.dtype
    state: tuple[bool, bool, torch.dtype]
    """Whether gradients are taken, whether autocast is on, and to which type."""
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: Step | None = None
    """Whose result stands at `at` among the arguments; None for the product."""
    at: int = 0
    versions: list[int]
    """Of the tensors among the arguments."""
    value: torch.Tensor | None = None
    version: int = 0
    """Of `value` when it was computed."""

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was read of what led to it, or changed in place."""
        if self.value is not None or versions_of(self.args, self.kwargs) != self.versions:
            return False
        return self.before is None or self.before.is_untouched

    def computed(self) -> torch.Tensor:
        """Its result, under the state in which the script asked for it."""
        if self.value is None:
            args, before = self.args, self.before
            if before is not None:
                args = (*args[: self.at], before.computed(), *args[self.at + 1 :])
                if before.version != args[self.at]._version:
                    raise NotDeferred("scores of attention were changed in place meanwhile")
            if versions_of(self.args, self.kwargs) != self.versions:
                raise NotDeferred("what attention is computed from was changed in place meanwhile")
            gradients, casts, dtype = self.state
            with torch.set_grad_enabled(gradients), torch.autocast(self.query.device.type, dtype, casts):
                self.value = self.func(*args, **self.kwargs)
            self.version = self.value._version  # type: ignore[union-attr]
        return self.value  # type: ignore[return-value]


class Deferred(torch.Tensor):
    """Stands in for scores or weights: knows its shape and type, and computes the rest when it is asked."""

    step: Step

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what belongs to attention; anything else gets the numbers."""
        if func in ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        kwargs, name = kwargs or {}, str(getattr(func, "__name__", func))
        out = _noted(func, name, args, kwargs)
        if out is not None:
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
        """By line of the script: why its product is computed at once; empty where nothing shows that it is attention."""
        self._thread = thread
        holders: list[tuple[Any, str]] = [(torch.Tensor, name) for name in ("__matmul__", "matmul", "bmm")]
        holders += [(torch, "matmul"), (torch, "bmm"), (torch._VF, "einsum")]
        self._patches = [Patch(holder, name, self._product) for holder, name in holders]

    def remove(self) -> None:
        """Put off no more; what was put off is computed when somebody asks."""
        self.on = False
        remove_all(self._patches)

    def _product(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        @wraps(original)
        def product(*args: Any, **kwargs: Any) -> Any:
            if self.on and patch.active and len(args) == 2 and not kwargs and not torch.compiler.is_compiling():
                out = self._scores(original, *args, sys._getframe(1))
                if out is not None:
                    return out
            return original(*args, **kwargs)

        return product

    def _scores(self, func: Any, a: Any, b: Any, frame: Any) -> Deferred | None:
        args = (a, b)
        if type(a) is str and len(b) == 2:  # `torch._VF.einsum`, called by `torch.einsum`
            func, frame, args = torch.functional.einsum, frame.f_back, (a, *b)
        query, key = args[-2:]
        if (
            (line := (frame.f_code, frame.f_lasti)) in self.reasons
            or type(query) not in PLAIN
            or type(key) not in PLAIN
        ):
            return None
        orders = orders_of(a) if type(a) is str else ORDERS.get(query.dim())
        if orders is None or [query.dim(), key.dim()] != [len(orders[0])] * 2 or orders[2] != [*range(query.dim())]:
            return None
        query, key = query.permute(orders[0]), key.permute(orders[1])
        alike = query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1] and query.dtype is key.dtype
        usual = query.is_floating_point() and query.layout is torch.strided and query.device == key.device
        if not alike or not usual or query.is_inference() or key.is_inference() or not trains(self._thread):
            return None
        state = _state(query.device.type)
        return _deferred(
            Step(
                owner=self, line=line, query=query, key=key, state=state, func=func, args=args, kwargs={},
                dtype=_type(torch.mm, query.dtype, query.device.type, state), versions=versions_of(args, {}),
            )
        )  # fmt: skip


def _deferred(step: Step) -> Deferred:
    shape = (*step.query.shape[:-1], step.key.shape[-2])
    made: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    out: Deferred = made(Deferred, shape, dtype=step.dtype, device=step.query.device)
    out.step = step
    return out


def versions_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """How often each tensor among these was changed in place."""
    return [one._version for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]


def _state(device: str) -> tuple[bool, bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@lru_cache
def _type(func: Any, dtype: torch.dtype, device: str, state: tuple[bool, bool, torch.dtype]) -> torch.dtype:
    """The type of a product's or a softmax's result, which autocast may decide."""
    small = torch.empty(1, 1, dtype=dtype, device=device)
    with torch.autocast(device, state[2], state[1]):
        return func(small, small if func is torch.mm else -1).dtype  # type: ignore[no-any-return]


def _numbers(name: str, asked: Deferred) -> torch.Tensor:
    """What was asked for, computed; that line of the script is put off no more."""
    step = asked.step
    if (
        step.owner.on and step.state[0] and not torch.is_grad_enabled()
    ):  # perhaps a Function, which has no gradient then
        raise NotDeferred("scores of attention are read where no gradients are taken")
    words = (
        "draws other random numbers where it is fused" if name == "dropout" else "needs scores or weights themselves"
    )
    step.owner.reasons.setdefault(step.line, f"`{name}` {words}" if step.before or name in RULES else "")
    return step.computed()


def _noted(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is put off after this operation, or the product with the values; None where it is not attention."""
    at = 1 if name == "einsum" else 0
    asked, rule = args[at] if len(args) > at else None, RULES.get(name)
    if rule is None or not isinstance(asked, Deferred) or not asked.step.owner.on:
        return None
    step, others = asked.step, args[:at] + args[at + 1 :]
    tensors = [one for one in (*others, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if (
        step.value is not None
        or any(type(one) not in PLAIN for one in tensors)
        or _state(asked.device.type) != step.state
    ):
        return None
    found = rule(step, others, kwargs)
    if not isinstance(found, dict):
        return found
    if not found:  # as it was
        return asked
    args = (*args[:at], None, *args[at + 1 :])
    versions = versions_of(args, kwargs)
    new = replace(step, **found, func=func, args=args, kwargs=kwargs, at=at, before=step, versions=versions)
    if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        asked.step = new
        return asked
    return _deferred(new)


def _scaled(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any], *, by: int) -> Any:
    factor = _number(others[0]) if len(others) == 1 and not kwargs else None
    if not factor or step.mask is not None or step.are_weights:
        return None
    return {"scale": step.scale * factor**by}


def _number(value: Any) -> float | None:
    """A number, also where it is a tensor that can be read without waiting."""
    if isinstance(value, torch.Tensor):
        free = value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
        return float(value) if free else None
    return float(value) if isinstance(value, int | float) else None


def _filled(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask, fill = [*others, *(kwargs[name] for name in ("mask", "value") if name in kwargs)]
    fill = _number(fill)
    if fill is None or not fill <= HIDES or not _fits(mask, step) or mask.dtype is not torch.bool:
        return None
    return {"mask": mask, "fill": fill}


def _added(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask = others[0] if len(others) == 1 and not kwargs else None
    if not _fits(mask, step) or mask.dtype is not step.dtype or mask.requires_grad:  # type: ignore[union-attr]
        return None
    return {"mask": mask}


def _fits(mask: Any, step: Step) -> bool:
    """Whether it is a first mask, and broadcast to the scores without making them larger."""
    if not isinstance(mask, torch.Tensor) or step.mask is not None or step.are_weights:
        return False
    sizes = zip(reversed(mask.shape), (step.key.shape[-2], *reversed(step.query.shape[:-1])), strict=False)
    return mask.dim() <= step.query.dim() and all(size in (1, whole) for size, whole in sizes)


def _weighed(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = kwargs.get("dim", others[0] if others else None)
    dtype = kwargs.get("dtype", others[1] if len(others) > 1 else None)
    if step.are_weights or dim not in (-1, step.query.dim() - 1):
        return None
    return {"are_weights": True, "dtype": dtype or _type(torch.softmax, step.dtype, step.query.device.type, step.state)}


def _dropped(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing is, with a rate of 0 and while the model is evaluated."""
    rate, training = [*others, kwargs.get("p", 0.5), kwargs.get("training", True)][:2]
    return None if rate and training else {}


def _cast(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wanted = [*others, *kwargs.values()] or [torch.float]
    dtype = getattr(wanted[0], "dtype", wanted[0])
    if len(wanted) > 1 or getattr(wanted[0], "device", step.query.device) != step.query.device:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return {} if dtype is step.dtype else {"dtype": dtype}


def _mixed(step: Step, others: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The product with the values, by letters where the first of the others is an equation."""
    if kwargs or not isinstance(others[-1], torch.Tensor) or len(others) > 2:
        return None
    value = others[-1]
    orders = ORDERS[step.query.dim()] if len(others) == 1 else orders_of(others[0])
    if orders is None or orders[0] != [*range(step.query.dim())] or value.dim() != len(orders[1]):
        return None
    out = _attended(step, value.permute(orders[1]).mT)
    return None if out is None else out.permute(orders[2])


def _attended(step: Step, value: torch.Tensor) -> torch.Tensor | None:
    """The fused operation; None where it does not compute the same, or something else has read a part of it."""
    query, key = step.query, step.key
    cast = step.state[1] or query.dtype is value.dtype is step.dtype
    if not (step.are_weights and cast and step.is_untouched) or value.shape != (*key.shape[:-1], query.shape[-1]):
        return None
    mask, causal, dead = _mask(step)
    query, key, four = (one[(None,) * (4 - one.dim())] for one in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, four, mask, is_causal=causal, scale=step.scale)
    out = out.view(*out.shape[4 - value.dim() :])
    step.owner.num_fused += 1
    return out if dead is None else torch.where(dead, value.mean(-2, keepdim=True).to(out.dtype), out)


def _mask(step: Step) -> tuple[torch.Tensor | None, bool, torch.Tensor | None]:
    """A mask of four dimensions, whether it is causal instead, and the rows of which all is replaced, if any.

    On a device nothing is read, for that would have to be waited for.
    """
    if (mask := step.mask) is None:
        return None, False, None
    rows, columns = step.query.shape[-2], step.key.shape[-2]
    replaces, on_host = mask.dtype is torch.bool, mask.device.type == "cpu"
    if on_host and mask.shape[-2:] == (rows, rows) == (rows, columns) and mask.numel() == rows * rows:
        square = mask.view(rows, rows)
        hidden = square if replaces else square <= HIDES
        if torch.equal(hidden, _above_diagonal(rows)) and (replaces or not square.tril().any()):
            return None, True, None
    dead = None
    if replaces and step.fill != -torch.inf:  # the weights of such a row are equal then, and not undefined
        dead = mask.all(-1, keepdim=True)
        dead = None if on_host and not dead.any() else dead
    if replaces:
        mask = ~mask if dead is None else ~mask | dead
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, rows, columns), False, dead


@lru_cache(maxsize=8)
def _above_diagonal(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


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
    batch, summed = sorted({*a} & {*b} & {*out}, key=out.index), sorted({*a} & {*b} - {*out})
    rows = [sorted({*a} - {*b}), sorted({*b} - {*a})]
    if [*map(len, (summed, *rows))] != [1, 1, 1] or {*batch, *rows[0], *rows[1]} != {*out}:
        return None
    one, other = (
        [word.index(letter) for letter in (*batch, *row, *summed)] for word, row in zip((a, b), rows, strict=True)
    )
    return one, other, [[*batch, *rows[0], *rows[1]].index(letter) for letter in out]


ORDERS = {3: orders_of("bij,bjk->bik"), 4: orders_of("abij,abjk->abik")}
"""Of `torch.matmul`, by the number of dimensions."""

RULES: Mapping[str, Callable[[Step, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "mul_", "__imul__"), partial(_scaled, by=1)),
    **dict.fromkeys(("div", "__truediv__", "div_", "__itruediv__"), partial(_scaled, by=-1)),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _filled),
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__"), _added),
    **{"softmax": _weighed, "dropout": _dropped, "to": _cast, "type_as": _cast, "float": _cast},
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "einsum"), _mixed),
}
"""By the operation's name: what is new of the scores or weights that it makes; None where it is not put off."""
