"""What do optimizers do to the parameters under a lever? Three updates from one snapshot, and everything put back.

In: optimizers whose gradients are complete. Out: how far each parameter moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.differences import Gradients
from flatout.frameworks.pytorch.session import Session

NUM_UPDATES = 3
"""Updates compared: the first has no moments yet, the third shows a wrong pairing of moments and parameters."""


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update would change anything."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class Snapshot:
    """Parameters, gradients, optimizer state and options as they are now, in memory of their own."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._parameters = {
            p: p.detach().clone() for o in optimizers for group in o.param_groups for p in group["params"]
        }
        self._gradients = [(p.grad, p.grad.detach().clone()) for p in self._parameters if p.grad is not None]
        self._optimizers = [_OptimizerState(o) for o in optimizers]

    def restore_gradients(self) -> None:
        """Put gradients back: an update may write into them (foreach SGD with Nesterov momentum does)."""
        for gradient, value in self._gradients:
            if gradient.layout is torch.strided:
                gradient.data.copy_(value)

    def moved(self) -> Gradients:
        """How far each parameter is from here."""
        return {p: p.detach() - value for p, value in self._parameters.items()}  # type: ignore[misc]

    def restore(self) -> None:
        """Put everything back, in the memory format that it has now."""
        for parameter, value in self._parameters.items():
            parameter.data.copy_(value)
        self.restore_gradients()
        for state in self._optimizers:
            state.restore()


class _OptimizerState:
    """State by parameter, options by group, and what the optimizer keeps on itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {owner: _kept(state) for owner, state in optimizer.state.items()}
        self._groups = [_kept({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        self._own = {k: v for k, v in vars(optimizer).items() if type(v) in (bool, int, float, str, type(None))}

    def restore(self) -> None:
        state = self._optimizer.state
        for owner in list(state):
            if owner in self._state:
                _put_back(state[owner], self._state[owner])
            else:
                del state[owner]
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            _put_back(group, kept, always=("params",))
        vars(self._optimizer).update(self._own)


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _kept(v) for k, v in value.items()}
    return value.copy() if type(value) is list else value


def _put_back(present: Any, kept: Any, always: tuple[str, ...] = ()) -> None:
    if not isinstance(present, dict) or not isinstance(kept, dict):
        return
    for key in [k for k in present if k not in kept and k not in always]:
        del present[key]
    for key, value in kept.items():
        now = present.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == value.shape:
            now.data.copy_(value)
        else:
            present[key] = _kept(value)


def updated(session: Session, optimizers: Sequence[torch.optim.Optimizer], snapshot: Snapshot) -> Gradients:
    """How far each parameter moves in three updates under the engaged levers; everything is put back after."""
    session.silent = True
    try:
        for optimizer in optimizers:
            with _without_hooks(optimizer):
                for _ in range(NUM_UPDATES):
                    snapshot.restore_gradients()
                    session.flags.before_update(optimizer)
                    type(optimizer).step(optimizer)  # type: ignore[call-arg]
                    session.flags.after_update(optimizer)
        return snapshot.moved()
    finally:
        snapshot.restore()
        session.silent = False


class _without_hooks:
    """The script's own step hooks (averages of weights, schedules) do not see our updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        self._kept = (self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks)
        self._optimizer._optimizer_step_pre_hooks = type(self._kept[0])()
        self._optimizer._optimizer_step_post_hooks = type(self._kept[1])()

    def __exit__(self, *_: object) -> None:
        self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks = self._kept
