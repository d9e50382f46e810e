"""What of a value is no tensor, and what does a module know of earlier calls?

In: a value that a call is given or returns; a module, before and after another way of computing a call. Out: text that
tells kinds of calls apart; the name of what the module does not remember alike.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flatout.frameworks.pytorch.parallel.assembly import is_close, tolerance
from flatout.frameworks.pytorch.seams.module_state import INTERNAL
from flatout.frameworks.pytorch.seams.trees import MAX_DEPTH, parts_of, tensors_of


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


SIMPLE = (bool, int, float, complex, str, bytes)

MOST_ELEMENTS = 1000
"""Of larger containers only the number of elements is compared."""

LEAST = 1e-7
"""Numbers that are smaller than this are nought."""

_OPAQUE = (torch.Tensor, nn.Module, torch.optim.Optimizer, torch.Generator, random.Random, types.ModuleType,
           types.MethodType, types.BuiltinFunctionType, *SIMPLE)  # fmt: skip


class Fields(dict[str, Any]):
    """The attributes of an object or a class."""


def copied(value: Any, leaf: Callable[[Any], Any], depth: int = 2) -> Any:
    """What containers and plain objects hold, two levels down; `leaf` of all else."""
    if not depth or isinstance(value, _OPAQUE) or type(value).__module__ == "numpy":
        return leaf(value)
    if isinstance(value, dict | list | tuple | deque | set):
        if len(value) > MOST_ELEMENTS:
            return len(value)
        if isinstance(value, set):
            return frozenset(value)
        if isinstance(value, dict):
            return {name: copied(one, leaf, depth - 1) for name, one in value.items()}
        return [copied(one, leaf, depth - 1) for one in value]
    fields = _fields(value)
    return leaf(value) if fields is None else Fields({name: copied(one, leaf, depth - 1) for name, one in fields})


def _fields(value: Any) -> Iterable[tuple[str, Any]] | None:
    """The attributes of a plain object, or those of a class that bind nothing; None for any other."""
    kind = value if isinstance(value, type) else type(value)
    fields = getattr(value, "__dict__", None)
    if kind.__module__.partition(".")[0] == "torch" or not isinstance(fields, Mapping):
        return None
    if kind is not value:
        return fields.items()
    return [(n, one) for n, one in fields.items() if not hasattr(type(one), "__get__") and not isinstance(one, type)]


def remembered(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of what a module knows of earlier calls, by the names of buffers and attributes."""
    found = {name: _cloned(buffer) for name, buffer in module.named_buffers()}
    return found | {name: copied(value, _cloned) for name, value in _attributes(module)}


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in INTERNAL:
                yield f"{prefix}.{name}".removeprefix("."), value


def _cloned(value: Any) -> Any:
    """What a comparison needs; None for what is not compared."""
    if isinstance(value, torch.Tensor):
        is_trained = value.requires_grad and value.grad_fn is None
        return None if value.is_meta or is_trained else value.detach().clone()
    if type(value).__module__ == "numpy":
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # texts, objects
            return torch.tensor(value)
    return value if isinstance(value, SIMPLE) else None


def forgotten(wanted: dict[str, Any], module: torch.nn.Module) -> str | None:
    """The name of something that a module does not know as it was remembered; None where it knows all."""
    found, averaged = remembered(module), _averaged(module)
    for name in {**wanted, **found}:
        if name not in found or name not in wanted:
            return name
        if not _is_alike(found[name], wanted[name], averaged.get(name, 0.0)):
            return name
    return None


def kept_graphs(module: torch.nn.Module) -> set[str]:
    """Attributes in which tensors of a graph are kept, which the script may take gradients of by itself."""

    def is_of_graph(value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) and value.grad_fn is not None else None

    return {name for name, value in _attributes(module) if tensors_of(copied(value, is_of_graph))}


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
