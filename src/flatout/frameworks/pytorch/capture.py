"""What went into the model in one step, and what gradient came back? Kept, so that the step's calls can be replayed.

Two consecutive steps are kept: the second is compared, the first shows how much gradients differ between batches
anyway. In: the outermost calls of the running script. Out: `CapturedCall`s. Only in throwaway children, within a
memory limit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from flatout.frameworks.pytorch.calls import Calls, OuterCall


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of a call's result, in order: trees of containers, and objects that are mappings or dataclasses."""
    leaves, _ = tree_flatten(tree)
    found: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found.extend(t for name in leaf.__dataclass_fields__ for t in tensors_of(getattr(leaf, name)))
    return found


class RandomStates:
    """Where every random generator stands: PyTorch's, Python's, and NumPy's where it is loaded."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Put every generator back here."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def equals(self, other: RandomStates) -> bool:
        """Whether all generators stand at the same place."""
        if not torch.equal(self.torch, other.torch) or self.python != other.python:
            return False
        if any(not torch.equal(a, b) for a, b in zip(self.cuda, other.cuda, strict=False)):
            return False
        if self.numpy is None or other.numpy is None:
            return True
        return bool(self.numpy[2] == other.numpy[2] and (self.numpy[1] == other.numpy[1]).all())


class CapturedCall:
    """One outermost call: its arguments before it ran, the random states, its buffers, the gradient that came back."""

    def __init__(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = call
        self.args = tree_map(_copy, args)
        self.kwargs = tree_map(_copy, kwargs)
        self.random = RandomStates()
        self.buffers = [(b, b.detach().clone()) for b in call.module.buffers()]
        self.gradients: list[torch.Tensor | None] = []
        self.cleared: set[int] = set()
        """Parameters whose gradient was set to zero after this call, so that it is no longer part of theirs."""

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes."""
        kept = [t for t in tree_flatten((self.args, self.kwargs))[0] if isinstance(t, torch.Tensor)]
        kept += [value for _, value in self.buffers]
        return sum(t.numel() * t.element_size() for t in kept)

    def watch(self, out: Any) -> None:
        """Note the gradients that come back for the tensors of `out`."""
        for position, tensor in enumerate(t for t in tensors_of(out) if t.requires_grad):
            self.gradients.append(None)
            tensor.register_hook(self._noter(position))

    def _noter(self, position: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            former = self.gradients[position]
            self.gradients[position] = gradient.detach() if former is None else former + gradient.detach()

        return note


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


class Capture:
    """Keeps the calls of two consecutive steps when asked to."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.limit_bytes = 200_000_000
        self.wanted = False
        self.active = False
        self.complete = False
        """Whether the second step is under way."""
        self.overflow = False
        self.former: list[CapturedCall] = []
        self.present: list[CapturedCall] = []
        self._undo: list[Callable[[], None]] = []

    def want(self) -> None:
        """Keep the next two steps; the first begins now, at a boundary."""
        self.drop()
        self.wanted = True
        self.active = True
        self._calls.capture = self._record
        self._watch_zeroing()

    def at_boundary(self) -> None:
        """A step has ended: what was kept becomes the former step."""
        self.former, self.present = self.present, []
        self.complete = True
        if self.overflow:  # one step alone, as far as memory allows
            self.former = []

    def drop(self) -> None:
        """Forget everything and stop."""
        self.wanted = self.active = self.complete = self.overflow = False
        self.former, self.present = [], []
        self._calls.capture = None
        for undo in self._undo:
            undo()
        self._undo = []

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to update; nothing is kept beyond this point of the step's last update."""

    def _record(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.overflow:
            return call.with_levers(args, kwargs)
        captured = CapturedCall(call, args, kwargs)
        kept = sum(c.num_bytes for c in (*self.former, *self.present))
        if kept + captured.num_bytes > self.limit_bytes:
            self.former = []
            kept = sum(c.num_bytes for c in self.present)
        if kept + captured.num_bytes > self.limit_bytes:
            self.overflow = True
            self.present = []
            return call.with_levers(args, kwargs)
        self.present.append(captured)
        out = call.with_levers(args, kwargs)
        captured.watch(out)
        return out

    def _watch_zeroing(self) -> None:
        for kind, parameters_of in (
            (torch.optim.Optimizer, lambda o: (p for g in o.param_groups for p in g["params"])),
            (torch.nn.Module, lambda m: m.parameters()),
        ):
            self._undo.append(self._replace_zero_grad(kind, parameters_of))

    def _replace_zero_grad(self, kind: Any, parameters_of: Callable[[Any], Iterable[Any]]) -> Callable[[], None]:
        original = kind.zero_grad

        def zero_grad(target: Any, *args: Any, **kwargs: Any) -> Any:
            cleared = {id(p) for p in parameters_of(target)}
            for captured in self.present:
                if any(g is not None for g in captured.gradients):  # not before its gradient has come at all
                    captured.cleared |= cleared
            return original(target, *args, **kwargs)

        kind.zero_grad = zero_grad

        def undo() -> None:
            if kind.zero_grad is zero_grad:
                kind.zero_grad = original

        return undo
