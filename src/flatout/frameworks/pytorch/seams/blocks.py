"""Which parts of a model are the same again and again, and how are they computed otherwise, all alike?

Repeated blocks are the layers of a transformer, the stages of a residual network: what is made for one of them serves
all. In: a module. Out: groups of blocks, and a seam in each.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatout.frameworks.pytorch.seams.backward_threads import trains

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.calls import Calls

FEWEST_REPEATED = 3
"""So many of a kind in one container, or what is made for one of them hardly serves others."""


def repeated_blocks(module: nn.Module) -> list[list[nn.Module]]:
    """Groups of alike blocks, the outermost that there are.

    Alike is what has the same class and parameters of the same names, shapes and types, and stands in the same list or
    sequence; a single layer (`nn.Linear`) is no block.
    """
    found: list[list[nn.Module]] = []
    seen: set[int] = set()
    _collect(module, found, seen)
    return found


def _collect(module: nn.Module, found: list[list[nn.Module]], seen: set[int]) -> None:
    groups: dict[Any, list[nn.Module]] = {}
    for child in module.children():
        groups.setdefault(_kind(child), []).append(child)
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for kind, children in groups.items():
        new = [child for child in children if id(child) not in seen]
        seen.update(map(id, new))
        if is_container and kind[1] and len(new) >= FEWEST_REPEATED and any(True for _ in new[0].children()):
            found.append(new)
            continue
        for child in new:
            _collect(child, found, seen)


def _kind(module: nn.Module) -> tuple[type, tuple[Any, ...]]:
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())


class BlockCall:
    """The seam in one block: where gradients are taken it is computed otherwise, else as the script wrote it.

    It stays until it is removed: what checkpoints activations computes blocks a second time in the backward, where
    they have to keep the same tensors as before.
    """

    def __init__(self, block: nn.Module, compute: Callable[..., Any], owner: Calls) -> None:
        self._block = weakref.ref(block)
        self._compute = compute
        self._owner = owner
        self.num_calls = 0
        """Calls within one of the model, where what raises is caught."""

    def install(self) -> None:
        """Become the block's call, unless the script has compiled it in place."""
        block = self._block()
        if block is not None and vars(block).get("_compiled_call_impl") is None:
            vars(block)["_compiled_call_impl"] = self

    def remove(self) -> None:
        """Give the block its own call back."""
        block = self._block()
        if block is not None and vars(block).get("_compiled_call_impl") is self:
            del vars(block)["_compiled_call_impl"]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle finds None in our place."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block, or the replica of it that calls (`nn.DataParallel` copies a module's `__dict__`)."""
        if torch.compiler.is_compiling():
            return self._block()._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        block = sys._getframe(1).f_locals.get("self")
        if not isinstance(block, nn.Module):  # called by its attribute
            block = self._block()
        owner = self._owner
        ours = block is self._block() and torch.is_grad_enabled() and trains(owner.thread)
        if not ours or not (owner.inside or self.num_calls) or torch._C._get_tracing_state() is not None:
            return block._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        out = self._compute(block, *args, **kwargs)
        self.num_calls += owner.inside
        return out
