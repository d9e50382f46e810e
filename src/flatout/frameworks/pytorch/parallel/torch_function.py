"""What does Python ask of a sharded tensor, and how is it answered for the whole?

Shapes are told. Arithmetic by elements is done on the parts that are here; norms are put together from those of parts;
anything else gathers the whole on every rank, for all ranks run the same script. What should be views are copies; who
writes into one is refused. In: a function of PyTorch's and its arguments, some of them sharded. Out: what one process
gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import (
    REPLICATE,
    Copied,
    Gathered,
    Placement,
    Sharded,
    become,
    copied,
    name_of,
    version_of,
    writes,
)
from flatout.frameworks.pytorch.seams.trees import map_tensors

Of: Any = torch.Tensor  # its descriptors are not known to type checkers


_PROPERTIES = (
    "requires_grad is_leaf grad_fn _version _backward_hooks dtype device layout is_cuda is_cpu is_sparse is_quantized "
    "is_meta is_nested ndim itemsize output_nr retains_grad"
)
_METHODS = (
    "requires_grad_ retain_grad detach_ register_post_accumulate_grad_hook dim element_size is_floating_point "
    "is_complex is_signed is_contiguous __hash__ get_device is_inference untyped_storage data_ptr backward "
    "storage_offset is_conj is_neg is_pinned is_shared"
)
OF_THE_OBJECT = (
    {getattr(Of, name).__get__ for name in _PROPERTIES.split()}
    | {getattr(Of, name) for name in _METHODS.split()}
    | {Of.requires_grad.__set__, Of._backward_hooks.__set__}
    | {torch.is_floating_point, torch.is_complex, torch.is_inference}
)
"""Asked of the object, and answered as of any other."""

GRAD, SET_GRAD, DATA, SET_DATA = Of.grad.__get__, Of.grad.__set__, Of.data.__get__, Of.data.__set__
SAME_PART = {DATA, Of.detach, torch.detach}

SHAPES: dict[Any, Callable[..., Any]] = {
    Of.shape.__get__: lambda whole: whole.shape,
    Of.size: lambda whole, dim=None: whole.size() if dim is None else whole.size(dim),
    **dict.fromkeys((Of.numel, Of.nelement, torch.numel), lambda whole: whole.numel()),
    Of.stride: lambda whole, *dim: whole.stride(*dim),
    Of.__len__: len,
    Of.nbytes.__get__: lambda whole: whole.nbytes,
}

_ELEMENTWISE = (
    "add sub rsub subtract mul multiply div divide true_divide neg negative abs absolute square sqrt rsqrt pow exp log "
    "sign clamp clip clamp_min clamp_max maximum minimum lerp addcmul addcdiv reciprocal sigmoid tanh relu zero fill "
    "copy clone where isfinite isnan isinf eq ne lt le gt ge logical_and "
    "logical_or logical_not nan_to_num masked_fill contiguous float double half bfloat16 "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __div__ __rdiv__ __idiv__ __neg__ __abs__ __pow__ __ipow__ __rpow__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__ _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_neg _foreach_abs _foreach_sqrt "
    "_foreach_reciprocal _foreach_pow _foreach_exp _foreach_lerp _foreach_addcmul _foreach_addcdiv _foreach_zero "
    "_foreach_clamp_min _foreach_clamp_max _foreach_maximum _foreach_minimum _foreach_copy _foreach_sign"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""What is computed element by element; with an underscore at its end in place."""

_VIEWS = (
    "__getitem__ view view_as reshape narrow select chunk split t transpose permute squeeze unsqueeze flatten unbind "
    "diagonal expand swapaxes movedim unflatten unfold as_strided tensor_split __get__ __iter__ hsplit vsplit"
)
VIEWS = frozenset(_VIEWS.split())
"""What gives a tensor that shares the memory of another one; `__get__`: `.T` and the like."""

NORMS = ("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm")


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    """One question; the machinery by which it came here is off."""
    if func in OF_THE_OBJECT or func is torch.autograd.backward:
        return func(*args, **kwargs)
    if func is torch.autograd.grad:
        return _gradients(func, args, kwargs)
    first = args[0] if args else None
    if func == SET_DATA and not isinstance(first, Sharded):
        return func(first, _whole(args[1], {}).detach())
    if isinstance(first, Sharded):
        if func == GRAD:
            grad = func(first)
            return grad if grad is None or type(grad) is Sharded else become(grad, first.placement)
        if func == SET_GRAD:
            return func(first, _part_for(args[1], first.placement))
        if func == SET_DATA:
            return _set_data(first, args[1])
        if func == Of.register_hook:
            return func(first, hook_of_wholes(args[1], first.placement))
        if func in SAME_PART:
            found = become(func(first), first.placement)
            found.origin = first
            return found
        shape = SHAPES.get(func)
        if shape is not None:
            return shape(torch.empty(first.placement.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
    return _computed(func, args, kwargs)


Sharded.answer = staticmethod(answer)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    name = name_of(func)
    if (name in ELEMENTWISE or name.removesuffix("_") in ELEMENTWISE) and not (name == "where" and len(args) < 3):
        found = _by_parts(func, args, kwargs)
        if found is not None:
            return found[0]
    if name in NORMS:
        norms = _norms(args, kwargs)
        if norms is not None:
            return norms
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscaled(func, args, kwargs)
    return _by_wholes(func, name, args, kwargs)


def _part_for(value: Any, cut: Placement) -> Any:
    """A gradient that the script sets, as this rank's part."""
    if value is None or isinstance(value, Sharded):
        return value
    return become(cut.mine(value).clone(), cut)


def hook_of_wholes(hook: Callable[[Any], Any], cut: Placement) -> Callable[[Any], Any]:
    """A hook of the script's on a gradient, which autograd may hand on as a plain part."""

    def call(gradient: torch.Tensor) -> Any:
        with torch._C._EnableTorchFunction():
            found = hook(gradient if isinstance(gradient, Sharded) else become(gradient, cut))
        return _part_for(found, cut)

    return call


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad`: of what is sharded, parts."""
    inputs = flat(args[1] if len(args) > 1 else kwargs["inputs"])
    found = func(*args, **kwargs)
    for one, to in zip(found, inputs, strict=True):
        if isinstance(to, Sharded) and one is not None and not isinstance(one, Sharded):
            become(one, to.placement)
    return found


def _set_data(tensor: Sharded, value: torch.Tensor) -> None:
    """`p.data = value`: values in memory of their own; who holds the memory that was there keeps it as it is."""
    cut = tensor.placement
    shape = value.placement.shape if isinstance(value, Sharded) else value.shape
    if shape != cut.shape or value.dtype != tensor.dtype or value.device.type != tensor.device.type:
        problem = NotDivided(
            "a parameter's shape, type or device changes in training",
            cause=f"from {tuple(cut.shape)}, {tensor.dtype} to {tuple(shape)}, {value.dtype}, and it is sharded",
            hint=REPLICATE,
        )
        cut.refuse(problem)
    mine = (value if isinstance(value, Sharded) else cut.mine(value)).detach()
    moved = getattr(tensor, "moved", torch.clone)
    SET_DATA(tensor, moved(mine))
    with torch.no_grad():
        tensor.detach().mul_(1)  # whoever has gathered the parameter sees by its version that it is another one


def flat(value: Any) -> Iterable[Any]:
    """What is not a container, within containers."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from flat(one)
    else:
        yield value


# -- by parts ----------------------------------------------------------------------------------------------------------


def _by_parts(func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """What is computed on parts, where all tensors are sharded alike, or whole and can be cut so, or single numbers."""
    values = [*args, *kwargs.values()]
    every = list(flat(values))
    cuts = [one.placement for one in every if isinstance(one, Sharded)]
    plain = [one for one in every if isinstance(one, torch.Tensor) and not isinstance(one, Sharded) and one.dim()]
    lists = [[p.placement for p in one if isinstance(p, Sharded)] for one in values if isinstance(one, list | tuple)]
    if lists:  # of tensors that are cut alike, one after the other
        lists = [one for one in lists if one]
        alike = (len(one) == len(lists[0]) and all(map(Placement.is_alike, one, lists[0])) for one in lists)
        if plain or not all(alike):
            return None
    elif not all(one.is_alike(cuts[0]) for one in cuts) or any(
        one.shape != cuts[0].shape or (one.requires_grad and torch.is_grad_enabled()) for one in plain
    ):
        return None
    if writes(func) and not all(isinstance(one, Sharded) for one in flat(args[0])):
        return None  # a whole tensor is written to

    def cut(one: Any) -> Any:
        return cuts[0].mine(one) if any(one is each for each in plain) else one

    found = func(*map(cut, args), **{name: cut(one) for name, one in kwargs.items()})
    if isinstance(found, list | tuple):
        of = [one.placement for one in flat(args[0]) if isinstance(one, Sharded)]
        return (type(found)(map(become, found, of)),)
    is_part = isinstance(found, torch.Tensor) and type(found) is not Sharded and found.shape == cuts[0].part_shape
    return (become(found, cuts[0]) if is_part else found,)


# -- put together ------------------------------------------------------------------------------------------------------


def _norms(args: Any, kwargs: Any) -> Any:
    """Norms over all elements, put together from those of parts by one exchange; None where it is no such norm."""
    many = isinstance(args[0], list | tuple)
    tensors = list(args[0]) if many else [args[0]]
    words = {"order": args[1]} if len(args) > 1 else {}
    words |= {"order" if key in ("p", "ord") else key: value for key, value in kwargs.items()}
    words = {key: value for key, value in words.items() if value is not None and value is not False}
    order, kind = words.pop("order", 2), words.pop("dtype", None)
    order = 2.0 if order == "fro" else order
    differentiable = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if differentiable or words or len(args) > 2 or not isinstance(order, int | float) or order <= 0:
        return None
    cut = next(one.placement for one in tensors if isinstance(one, Sharded))
    own = [_own_norm(one, float(order), cut.group.rank) for one in tensors]
    numbers = [own[0].new_full((), one.placement.number if isinstance(one, Sharded) else -1) for one in tensors]
    every, tags = cut.group.gather(torch.stack([*own, *numbers]), "norms of parts").split(len(own), 1)
    cut.compare(tags)
    whole = every.amax(0) if math.isinf(order) else every.pow(order).sum(0).pow(1 / order)
    found = [norm.to(kind or one.dtype) for norm, one in zip(whole, tensors, strict=True)]
    return found if many else found[0]


def _own_norm(tensor: torch.Tensor, order: float, rank: int) -> torch.Tensor:
    """A rank's contribution; that of a tensor that is whole is counted once."""
    if not tensor.numel() or (rank and not isinstance(tensor, Sharded)):
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    values = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    return torch.linalg.vector_norm(values, order, dtype=torch.float64)


def _unscaled(func: Any, args: Any, kwargs: Any) -> Any:
    """A gradient scaler's check: what is not finite on one rank is so on all."""
    func(*args, **kwargs)
    group = next(one.placement.group for one in args[0] if isinstance(one, Sharded))
    args[1].copy_(group.gather(args[1], "check of gradients").amax(0))


# -- by wholes ---------------------------------------------------------------------------------------------------------


def _by_wholes(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Gather what is sharded, compute as one process does; what was written to is cut again."""
    wholes: dict[int, tuple[Sharded, torch.Tensor]] = {}

    def call() -> Any:
        return func(*_whole(args, wholes), **{word: _whole(value, wholes) for word, value in kwargs.items()})

    target = kwargs["out"] if "out" in kwargs else args[0] if args else kwargs.get("tensor")  # `nn.init` names it
    if not (writes(func) or "out" in kwargs) or not any(isinstance(one, Sharded) for one in flat(target)):
        found = call()
        if name in ("numpy", "__array__"):
            found.flags.writeable = False  # what is written there would be lost
        elif name in VIEWS and args and isinstance(args[0], Sharded):
            copied(found, args[0])
        return found
    with torch.no_grad():
        found = call()
        written = {id(one) for one in flat(target)}
        for one, value in wholes.values():
            if id(one) in written:
                one.detach().copy_(one.placement.mine(value))
    back = {id(value): one for one, value in wholes.values()}
    return map_tensors(lambda tensor: back.get(id(tensor), tensor), found)


def _whole(value: Any, wholes: dict[int, tuple[Sharded, torch.Tensor]]) -> Any:
    """A value with what is sharded in it gathered, each once."""
    if isinstance(value, list | tuple):
        return type(value)([_whole(each, wholes) for each in value])
    if not isinstance(value, Sharded):
        return value
    if id(value) not in wholes:
        wholes[id(value)] = value, Gathered.apply(value, value.placement)
    return wholes[id(value)][1]


def answer_of_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """One question; the machinery by which it came here is off."""
    first = args[0] if args else None
    for one in flat((args, kwargs)):
        if isinstance(one, Copied) and one.seen != version_of(one.base):
            _refuse_view(one, "is used after that has changed")
    if func not in OF_THE_OBJECT and (writes(func) or "out" in kwargs):
        for one in flat(kwargs.get("out", first)):
            if isinstance(one, Copied):
                _refuse_view(one, "is written to")
    if any(isinstance(one, Sharded) for one in flat((args, kwargs))):
        return answer(func, args, kwargs)
    found = func(*args, **kwargs)
    if isinstance(first, Copied) and (name_of(func) in VIEWS or func in SAME_PART):
        copied(found, first.base)
    return found


Copied.answer = staticmethod(answer_of_copies)


def _refuse_view(copy: Copied, what: str) -> None:
    cut = copy.base.placement
    problem = NotDivided(
        f"a view of a sharded parameter {what}",
        cause=f"it is a copy of rows that ranks have gathered, of a parameter of shape {tuple(cut.shape)}",
        hint=f"write to the parameter itself (`p[rows] = values`), and take views anew; or {REPLICATE}",
    )
    cut.refuse(problem)
