"""What does the script do with its gradients between a backward pass and the update? It clears them, it clips them.

Both are noted with their arguments, so that they can be done again under a lever. In: `zero_grad` and the clipping
functions of `torch.nn.utils` while a step is kept. Out: what was called. Loaded in trials only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.patches import Patch, remove_all

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")

Parameters = Callable[[Any], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clearing:
    """One way in which the script sets gradients to zero: a call of `zero_grad` with its arguments."""

    target: weakref.ref[Any]
    kind: type
    """The class whose method it was; what a subclass does around it is not repeated."""
    owner: str
    parameters_of: Parameters
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self, target: Any) -> None:
        """Call what stands in that place now, with the same arguments."""
        own = vars(target).get("zero_grad")
        clear = own if own is not None else vars(self.kind)["zero_grad"].__get__(target)
        clear(*self.args, **self.kwargs)


class GradientCalls:
    """Notes clearings and clippings from `install` to `remove`."""

    def __init__(self, on_clearing: Callable[[set[int]], None]) -> None:
        self.clearings: list[Clearing] = []
        self.clippings: list[Callable[[], Any]] = []
        """Those since the latest backward pass, as calls of what stands under their name when they are made again."""
        self._on_clearing = on_clearing
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Begin to note."""
        kinds: tuple[tuple[type, Parameters], ...] = (
            (torch.optim.Optimizer, lambda o: (p for g in o.param_groups for p in g["params"])),
            (torch.nn.Module, lambda m: m.parameters()),
        )
        for kind, parameters_of in kinds:
            self._patches.append(Patch(kind, "zero_grad", self._noting_clearing(kind, parameters_of)))
        for name in CLIPPING:
            for holder in (torch.nn.utils, torch.nn.utils.clip_grad):
                self._patches.append(Patch(holder, name, self._noting_clipping(name)))

    def remove(self) -> None:
        """Leave nothing behind."""
        remove_all(self._patches)
        self.clearings.clear()
        self.clippings.clear()

    def _noting_clearing(self, kind: type, parameters_of: Parameters) -> Callable[[Any, Patch], Any]:
        def make(original: Any, patch: Patch) -> Any:
            def zero_grad(target: Any, *args: Any, **kwargs: Any) -> Any:
                if patch.active:
                    self._on_clearing({id(p) for p in parameters_of(target)})
                    if not any(c.target() is target and (c.args, c.kwargs) == (args, kwargs) for c in self.clearings):
                        self.clearings.append(
                            Clearing(
                                target=weakref.ref(target),
                                kind=kind,
                                owner=type(target).__name__,
                                parameters_of=parameters_of,
                                args=args,
                                kwargs=dict(kwargs),
                            )
                        )
                return original(target, *args, **kwargs)

            return zero_grad

        return make

    def _noting_clipping(self, name: str) -> Callable[[Any, Patch], Any]:
        def make(original: Any, patch: Patch) -> Any:
            def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                if not patch.active or torch.compiler.is_compiling():
                    return original(parameters, *args, **kwargs)
                listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                self.clippings.append(lambda: getattr(torch.nn.utils, name)(listed, *args, **kwargs))
                return original(listed, *args, **kwargs)

            return clip

        return make


def explained(
    clippings: Sequence[Callable[[], Any]],
    unclipped: dict[torch.Tensor, torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> bool:
    """Whether clipping what backward left gives the gradients that are there now; they are not changed."""
    present = {p: p.grad.detach().clone() for p in parameters if p.grad is not None}
    if not clippings or any(p not in unclipped or unclipped[p].layout is not torch.strided for p in present):
        return False
    try:
        clip(clippings, unclipped)
        return all(p.grad is not None and torch.allclose(p.grad, g, rtol=1e-5, atol=0) for p, g in present.items())
    except RuntimeError:  # of values that are no numbers, where the script asks for an error
        return False
    finally:
        for parameter, gradient in present.items():
            if parameter.grad is not None:
                parameter.grad.data.copy_(gradient)


def clip(
    clippings: Sequence[Callable[[], Any]], unclipped: dict[torch.Tensor, torch.Tensor], factor: float = 1.0
) -> None:
    """Put the gradients back as backward left them, or `factor` times that, and clip them as the script does."""
    for parameter, gradient in unclipped.items():
        if parameter.grad is not None:
            parameter.grad.data.copy_(gradient * factor if factor != 1.0 else gradient)
    for one in list(clippings):
        one()
