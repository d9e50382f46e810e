"""How are an optimizer's flags changed without the user's seeing it? In its groups, with `state_dict` kept as it was.

In: the user's optimizer. Out: a function that undoes the change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused update exists for this optimizer, its options and its parameters' devices."""
    if "fused" not in optimizer.defaults or any(group.get("fused") for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable") or group.get("foreach"):
            return False
        if any(p.device.type not in ("cpu", "cuda") or not p.is_floating_point() for p in group["params"]):
            return False
        if isinstance(group.get("lr"), torch.Tensor):
            return False
    return type(optimizer).__module__.startswith("torch.optim")


def can_foreach(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer knows the flag and the script has not decided about it."""
    return "foreach" in optimizer.defaults and all(g.get("foreach") is None for g in optimizer.param_groups)


def set_flags(optimizer: torch.optim.Optimizer, **flags: bool) -> Callable[[], None]:
    """Set flags in `defaults` and every group; returns what undoes it.

    `state_dict()` shows the script's own flags meanwhile, and a `load_state_dict()` keeps ours engaged.
    """
    own_defaults = {name: optimizer.defaults[name] for name in flags if name in optimizer.defaults}
    own_groups = [{name: group.get(name) for name in flags} for group in optimizer.param_groups]

    def engage(*_: Any) -> None:
        optimizer.defaults.update({name: flags[name] for name in own_defaults})
        for group in optimizer.param_groups:
            group.update(flags)
        _place_steps(optimizer, fused=bool(flags.get("fused")))

    def show_own(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, **own}
            for group, own in zip(state_dict["param_groups"], _padded(own_groups, state_dict), strict=True)
        ]
        return {**state_dict, "param_groups": groups}

    handles = [
        optimizer.register_state_dict_post_hook(show_own),
        optimizer.register_load_state_dict_post_hook(engage),
    ]

    def restore() -> None:
        for handle in handles:
            handle.remove()
        optimizer.defaults.update(own_defaults)
        for group, own in zip(optimizer.param_groups, own_groups, strict=False):
            group.update(own)
        _place_steps(optimizer, fused=False)

    engage()
    return restore


def _padded(own_groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    # A group that the script added after the lever was engaged shows the first group's flags.
    missing = len(state_dict["param_groups"]) - len(own_groups)
    return own_groups + own_groups[:1] * max(missing, 0)


def _place_steps(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    """A fused update wants its step counters on the parameter's device, a plain one on the CPU."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = step.to(parameter.device if fused else "cpu")
        elif isinstance(step, int | float) and fused:
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=parameter.device)
