"""Which is closer to the truth, plain or the lever? The same step in float64.

Parameters, buffers, inputs and output gradients are widened, autocast is off, and random numbers are drawn in the type
in which the script draws them, so that the same masks and the same noise come out. In: captured calls and their plain
replay. Out: the true gradients and outputs, or why there are none. Loaded in trials only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import apart, numbered, relative_error
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.room import room_bytes
from flatout.frameworks.pytorch.seams.trees import map_tensors
from flatout.guest.memory_errors import out_of_memory

AFFORDABLE_S = 0.5
"""Longest plain replay on a CPU of which the truth is computed: in float64 it takes 2 to 10 times as long."""

AFFORDABLE_ON_DEVICE_S = 5.0
"""Longest step in float64 on a device, where that takes 2 to 500 times as long: it is predicted from a product."""

AFFORDABLE_BYTES = 400_000_000
"""Most memory that the widened parameters may take; on a device with much that is free, more."""

PROBE_ROWS, PROBE_CALLS = 2048, 4
"""Of the products that are timed on a device: 17 GFLOP each, 0.3 ms in float64 on an H100, 60 ms on a T4."""

SAME_DRAWS = 0.02
SAME_DRAWS_IN_FLOAT32 = 0.5
"""Relative distance of the outputs beyond which random numbers were not the same, where any were drawn; in a model of
float32 the same operation draws them in the same type, so that only another path through the model can differ."""

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def true_step(
    replayer: Replayer, calls: Sequence[CapturedCall], plain: Replayed, *, levers: bool = False
) -> Replayed | str:
    """The step computed in float64, plain or under the engaged levers, or why that is not known."""
    modules = list({id(c.call.module): c.call.module for c in calls}.values())
    num_bytes = 8 * sum(p.numel() for module in modules for p in module.parameters())
    most_bytes = AFFORDABLE_BYTES if replayer.device == "cpu" else max(AFFORDABLE_BYTES, room_bytes(replayer.device))
    if num_bytes > most_bytes or plain.took_s > affordable_s(calls):
        return "a step in float64 would take too long"
    try:
        with _widened(modules), _Wide():
            found = replayer.run([_wide(c) for c in calls], levers=levers)
    except Exception as problem:  # a model may hold a type of its own anywhere
        if out_of_memory(problem):
            raise
        return f"the model does not compute in float64 ({type(problem).__name__})"
    if found.gradients.keys() != plain.gradients.keys() or not found.finite:
        return "in float64 other gradients come out"
    if any(value.dtype != torch.float64 for value in found.gradients.values()):
        return "the model does not compute in float64 throughout"
    if not _same_draws(calls, found, plain):
        return "in float64 the model draws other random numbers"
    return found


def affordable_s(calls: Sequence[CapturedCall]) -> float:
    """Longest plain replay of which the truth is computed."""
    if all(c.device == "cpu" for c in calls):
        return AFFORDABLE_S
    dtypes = {dtype for c in calls for dtype in (*c.autocast_dtypes, *(p.dtype for p in c.call.module.parameters()))}
    narrowest = min(dtypes & set(_NARROW), key=lambda dtype: dtype.itemsize, default=torch.float32)
    convolves = any(isinstance(part, _ConvNd) for c in calls for part in c.call.module.modules())
    return AFFORDABLE_ON_DEVICE_S / slowdown(narrowest, convolves, next(c.device for c in calls if c.device != "cpu"))


@functools.cache
def slowdown(dtype: torch.dtype, convolves: bool, device: str) -> float:
    """How many times as long a product, or also a convolution, takes on a device in float64 as in a type.

    As large as in models, and as often as a clock can see; in the type whatever the script allows (TF32) counts.
    """
    left = torch.ones(PROBE_ROWS, PROBE_ROWS, device=device)
    image, weight = (torch.ones(16, channels, size, size, device=device) for channels, size in ((16, 32), (16, 3)))
    found = [_seconds(torch.mm, (left, left), torch.float64) / _seconds(torch.mm, (left, left), dtype)]
    if convolves:
        both = (_seconds(torch.conv2d, (image, weight), one) for one in (torch.float64, dtype))
        found.append(next(both) / next(both))
    return max(1.0, *found)


def _seconds(compute: Callable[..., Any], args: tuple[torch.Tensor, ...], dtype: torch.dtype) -> float:
    from torch.utils.benchmark import Timer  # which waits for devices, and leaves out the first call

    names = {"compute": compute, "args": [a.to(dtype) for a in args]}
    return Timer("compute(*args)", globals=names).timeit(PROBE_CALLS).median


def _same_draws(calls: Sequence[CapturedCall], found: Replayed, plain: Replayed) -> bool:
    """Whether random numbers, where the step draws some, came out alike."""
    if not found.draws_as(plain):
        return False
    if calls[0].random.equals(plain.randoms[-1]):
        return True  # none was drawn: however far the outputs are apart, that is rounding
    error = relative_error(apart(numbered(found.outputs), numbered(plain.outputs), masks=True).values())
    narrow = any(c.autocast_dtypes or any(p.dtype in _NARROW[1:] for p in c.call.module.parameters()) for c in calls)
    return bool(plain.outputs) and error <= (SAME_DRAWS if narrow else SAME_DRAWS_IN_FLOAT32)


def _wide(call: CapturedCall) -> CapturedCall:
    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return call.changed(
        args=map_tensors(widen, call.args, objects=False),
        kwargs=map_tensors(widen, call.kwargs, objects=False),
        gradients=[g.double() if g is not None else None for g in call.gradients],
        former_values={p: v.double() if v.is_floating_point() else v for p, v in call.former_values.items()},
        autocast_off=True,
    )


@contextlib.contextmanager
def _widened(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Parameters, buffers and plain tensors of the modules in float64 meanwhile, in place."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in modules:
        attributes = [v for part in module.modules() for v in vars(part).values() if type(v) is torch.Tensor]
        for tensor in (*module.parameters(), *module.buffers(), *attributes):
            if tensor.dtype in _NARROW and tensor.layout is torch.strided:
                kept.setdefault(id(tensor), (tensor, tensor.data))
    default = torch.get_default_dtype()
    try:
        for tensor, value in kept.values():
            tensor.data = value.double()
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, value in kept.values():
            tensor.data = value


class _Wide(TorchDispatchMode):
    """Random operations in float64 are computed in float32 and widened, so that the same numbers come out, exactly.

    Nothing is narrowed meanwhile: casts of the model's own to float32, bfloat16 or float16 stay in float64.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and _is_wide(args[0]) and kwargs.get("dtype") in _NARROW:
            kwargs = {**kwargs, "dtype": torch.float64}  # the model narrows something itself
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        narrow = [a.float() if _is_wide(a) else a for a in args]
        if kwargs.get("dtype") is torch.float64 or ("dtype" in _names(func) and kwargs.get("dtype") is None):
            kwargs = {**kwargs, "dtype": torch.float32}
        out = func(*narrow, **kwargs)
        if func._schema.is_mutable and _is_wide(args[0]):
            args[0].copy_(narrow[0])
            return args[0]
        return map_tensors(lambda t: t.double() if t.dtype == torch.float32 else t, out)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def _names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}
