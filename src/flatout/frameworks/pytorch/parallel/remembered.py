"""What of a value is no tensor, and what does a module know of earlier calls?

In: a value that a call is given or returns; a module, before and after another way of computing a call. Out: text that
tells kinds of calls apart; the name of what the module does not remember alike.
"""

from __future__ import annotations

import math
import numbers
import types
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flatout.frameworks.pytorch.parallel.assembly import is_close, tolerance
from flatout.frameworks.pytorch.seams.module_state import INTERNAL
from flatout.frameworks.pytorch.seams.trees import MAX_DEPTH, parts_of


def skeleton(value: Any) -> str:
    """Everything but the tensors.

    >>> skeleton((torch.zeros(2), {"n": 3})), skeleton(torch.zeros(5))
    ('tuple(0:T,1:dict(n:3))', 'T')
    """
    return _of(value, 0)


def has_numbers_of_floats(value: Any, depth: int = 0) -> bool:
    """Whether there is a float among what is no tensor: most often it was computed from the batch."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return True
    if isinstance(value, torch.Tensor) or depth >= MAX_DEPTH:
        return False
    return any(has_numbers_of_floats(part, depth + 1) for _, part in parts_of(value))


def flags_of(module: nn.Module) -> str:
    """Switches that a module keeps as plain attributes."""
    return ",".join(f"{name}={value}" for name, value in vars(module).items() if isinstance(value, bool | str))


def _of(value: Any, depth: int) -> str:
    if isinstance(value, torch.Tensor):
        return "T"
    if value is None or isinstance(value, numbers.Number | str | bytes):
        return repr(value)
    if depth >= MAX_DEPTH:
        return type(value).__name__
    parts = ",".join(f"{key}:{_of(part, depth + 1)}" for key, part in parts_of(value))
    return f"{type(value).__name__}({parts})" if parts else type(value).__name__


MOST_ELEMENTS = 1000
"""Of larger containers only the number of elements is compared."""

LEAST = 1e-7
"""Numbers that are smaller than this are nought."""

_NEVER = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, type, types.ModuleType, types.FunctionType,
          types.MethodType, types.BuiltinFunctionType)  # fmt: skip


def remembered(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of what a module knows of earlier calls, by the names of buffers and attributes."""
    found = {name: _copied(buffer) for name, buffer in module.named_buffers()}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in INTERNAL:
                found[f"{prefix}.{name}".removeprefix(".")] = _copied(value)
    return found


def forgotten(wanted: dict[str, Any], module: torch.nn.Module) -> str | None:
    """The name of something that a module does not know as it was remembered; None where it knows all."""
    found, averaged = remembered(module), _averaged(module)
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        if name not in found or name not in wanted:
            return name
        if not _is_alike(found[name], wanted[name], averaged.get(name, 0.0)):
            return name
    return None


def kept_graphs(module: torch.nn.Module) -> set[str]:
    """Attributes in which tensors of a graph are kept, which the script may take gradients of by itself."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in INTERNAL and _holds_graph(value)
    }


def _copied(value: Any, depth: int = 2) -> Any:
    """What a comparison needs; None for what is not compared."""
    if isinstance(value, torch.Tensor):
        is_trained = value.requires_grad and value.grad_fn is None
        return None if value.is_meta or is_trained else value.detach().clone()
    if isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if type(value).__module__ == "numpy":
        return _of_numpy(value)
    if not depth:
        return None
    if isinstance(value, dict | list | tuple | deque | set):
        if isinstance(value, set) or len(value) > MOST_ELEMENTS:
            return len(value)
        if isinstance(value, dict):
            return {name: _copied(one, depth - 1) for name, one in value.items()}
        return [_copied(one, depth - 1) for one in value]
    fields = _fields(value)
    return None if fields is None else {name: _copied(one, depth - 1) for name, one in fields.items()}


def _fields(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object; None for any other."""
    if issubclass(type(value), _NEVER) or type(value).__module__.partition(".")[0] == "torch":
        return None
    try:
        fields = vars(value)
    except Exception:  # noqa: BLE001  an object may raise whatever it is asked for
        return None
    return fields if isinstance(fields, dict) else None


def _of_numpy(value: Any) -> torch.Tensor | None:
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):  # texts, objects
        return None


def _is_alike(found: Any, wanted: Any, rounded: float = 0.0) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor):
        return is_close(found, wanted, rounded=rounded)
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_is_alike(found[name], wanted[name]) for name in wanted)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_is_alike, found, wanted))
    if isinstance(found, float) and isinstance(wanted, float):  # NumPy's double is one
        near = math.isclose(found, wanted, rel_tol=tolerance(torch.float32), abs_tol=LEAST)
        return near or (math.isnan(found) and math.isnan(wanted))
    return type(found) is type(wanted) and bool(found == wanted)


def _holds_graph(value: Any, depth: int = 2) -> bool:
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if not depth:
        return False
    if isinstance(value, dict | list | tuple | deque):
        inner = value.values() if isinstance(value, dict) else value
        return len(value) <= MOST_ELEMENTS and any(_holds_graph(one, depth - 1) for one in inner)
    return any(_holds_graph(one, depth - 1) for one in (_fields(value) or {}).values())


def _averaged(module: torch.nn.Module) -> dict[str, float]:
    """The norm of what went into running means, by their names.

    Features whose mean is nought, as behind another normalisation, have rounding for a mean.
    """
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and part.running_mean is not None and part.running_var is not None:
            share = 1.0 if part.momentum is None else part.momentum
            found[f"{name}.running_mean".removeprefix(".")] = share * float(part.running_var.sqrt().norm())
    return found
