"""How does an optimizer update parameters of which a rank holds some rows?

One that computes element by element updates the rows, as if they were all; its state is sharded as the parameters are,
also what it loads from a checkpoint. PyTorch's others compute on what is whole to Python, and gather it. Those of
others, which may reach for memory, are refused. In: optimizers. Out: their steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.frameworks.pytorch.parallel.portions import REPLICATE
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded import Sharded, become
from flatout.frameworks.pytorch.seams.patches import Patch

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers whose update of an element needs that element alone. Source: `torch.optim`."""

Optimizer = torch.optim.Optimizer


class ShardedUpdates:
    """The optimizers of a process; `refuse` is told of those that cannot update rows, and ends the run."""

    def __init__(self, refuse: Callable[[NotDivided], Any]) -> None:
        self._refuse = refuse
        for kind in (getattr(torch.optim, name) for name in ELEMENTWISE):
            if "step" in vars(kind):
                Patch(kind, "step", self._by_rows)
        register_optimizer_step_pre_hook(self._check)
        if hasattr(clip_grad, "_get_total_norm"):
            Patch(clip_grad, "_get_total_norm", _of_all_at_once)

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if next(_sharded(optimizer), None) is None:
            return
        step = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
        if not step.__module__.startswith("torch.optim"):
            self._refuse(
                NotDivided(
                    f"`{type(optimizer).__name__}` cannot update parameters that are sharded",
                    cause=f"its step is not PyTorch's (`{step.__module__}`): it may need all of a parameter's memory, "
                    "and a rank holds some rows",
                    hint=REPLICATE,
                )
            )

    def _by_rows(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        del patch

        @functools.wraps(original)
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            parameters = list(_sharded(optimizer))
            if not parameters:
                return original(optimizer, closure) if closure is not None else original(optimizer)
            self._share_state(optimizer, parameters)
            with _as_rows(parameters):
                found = original(optimizer, _as_wholes(parameters, closure)) if closure else original(optimizer)
            self._share_state(optimizer, parameters)
            return found

        return step

    def _share_state(self, optimizer: Optimizer, parameters: list[Sharded]) -> None:
        """State is sharded as parameters are: what is whole is cut, what was made for rows stands for the whole."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or isinstance(value, Sharded) or not value.dim():
                    continue
                if value.shape == parameter.portions.part_shape:
                    become(value, parameter.portions)
                elif value.shape == parameter.portions.shape:
                    state[name] = become(parameter.portions.mine(value).clone(), parameter.portions)


def _of_all_at_once(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    """The norm of all gradients by one exchange, where PyTorch takes each by itself: the norm of norms is the same."""
    del patch

    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **words: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(isinstance(one, Sharded) for one in tensors):
            tensors = torch._foreach_norm(tensors, float(norm_type))
        return original(tensors, norm_type, *rest, **words)

    return total_norm


def _sharded(optimizer: Optimizer) -> Iterator[Sharded]:
    return (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Sharded))


@contextmanager
def _as_rows(parameters: list[Sharded]) -> Iterator[None]:
    """Parameters are their rows to whoever looks: PyTorch's kernels for many tensors want plain ones."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        for parameter in parameters:
            parameter.__class__ = Sharded


def _as_wholes(parameters: list[Sharded], closure: Callable[[], Any]) -> Callable[[], Any]:
    """The script's own closure, for which parameters are whole."""

    def call() -> Any:
        for parameter in parameters:
            parameter.__class__ = Sharded
        try:
            with torch._C._EnableTorchFunction(), torch.enable_grad():
                return closure()
        finally:
            for parameter in parameters:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    return call
