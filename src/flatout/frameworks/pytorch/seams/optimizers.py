"""How are an optimizer's flags changed without the user's seeing it? They hold while it updates, and not between.

So `param_groups`, `state_dict()`, `load_state_dict()` and groups that the script adds are the script's own at any time.
In: the user's optimizers and flags. Out: updates made with them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

Group = dict[str, Any]
_MISSING = object()

FUSED_DEVICES = {"Adagrad": ("cpu",)}
"""Devices on which an optimizer's fused update exists, where that is not everywhere. Source: `torch.optim.adagrad`."""

FUSED_ON_CPU = (torch.float32, torch.float64)
"""Types in which fused updates on a CPU are right. In PyTorch 2.13 SGD's with momentum reads a buffer that was never
filled where parameters are bfloat16 or float16, and Adam's gives NaN in float16: `benchmarks/claims.md`, "Numerics"."""


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused update exists for this optimizer, its options, its parameters and their gradients.

    An optimizer whose script decided about `fused` or `foreach` is left alone.
    """
    kind = type(optimizer)
    if optimizer.defaults.get("fused", False) is not None or not kind.__module__.startswith("torch.optim"):
        return False
    devices = FUSED_DEVICES.get(kind.__name__, ("cpu", "cuda"))
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("foreach"):
            return False
        if group.get("differentiable") or group.get("capturable") or isinstance(group.get("lr"), torch.Tensor):
            return False
        if not all(_can_fuse(p, devices) for p in group["params"]):
            return False
    return True


def _can_fuse(parameter: torch.Tensor, devices: tuple[str, ...]) -> bool:
    if parameter.device.type == "cpu" and parameter.dtype not in FUSED_ON_CPU:
        return False
    return parameter.device.type in devices and parameter.is_floating_point() and _is_dense(parameter)


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether its gradient is no sparse one, which one kernel for the whole update does not take."""
    return parameter.grad is None or parameter.grad.layout is torch.strided


def can_foreach(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer knows the flag, its options go with it, and the script has not decided about it."""
    return "foreach" in optimizer.defaults and all(
        g.get("foreach") is None and not g.get("fused") and not g.get("differentiable") and not _has_tensors(g)
        for g in optimizer.param_groups
    )


def _has_tensors(group: Group) -> bool:
    """Whether a learning rate or the like is a tensor, with which PyTorch refuses foreach but for `capturable`."""
    options = [group.get("lr"), *(group.get("betas") or ())]
    return not group.get("capturable") and any(isinstance(option, torch.Tensor) for option in options)


class UpdateFlags:
    """Flags by optimizer that are set in its groups while it updates."""

    def __init__(self) -> None:
        self._flags: MutableMapping[torch.optim.Optimizer, dict[str, bool]] = WeakIdKeyDictionary()
        self._own: list[tuple[Group, dict[str, Any]]] = []
        self._handles: MutableMapping[torch.optim.Optimizer, dict[str, list[Any]]] = WeakIdKeyDictionary()
        """Hooks on the optimizer's checkpoints, by what they put right."""
        self.num_updates = 0
        """Updates made with flags of ours since `engage`."""

    def engage(self, optimizer: torch.optim.Optimizer, flags: Mapping[str, bool]) -> None:
        """Set these flags in each update from now on."""
        self.num_updates = 0
        self._flags[optimizer] = {**self._flags.get(optimizer, {}), **flags}
        handles = self._handles.setdefault(optimizer, {})
        if "groups" not in handles:
            handles["groups"] = [optimizer.register_state_dict_post_hook(self._show_own_flags, prepend=True)]
        if flags.get("fused"):
            _align(optimizer)
            _place_steps(optimizer, fused=True)
            handles["fused"] = [
                optimizer.register_state_dict_post_hook(_show_plain_steps, prepend=True),
                optimizer.register_load_state_dict_post_hook(lambda loaded: _place_steps(loaded, fused=True)),
            ]

    def release(self, *names: str) -> None:
        """Set these flags no more, in any optimizer."""
        self.after_update()
        for optimizer, flags in list(self._flags.items()):
            if any(flags.pop(name, False) for name in names) and "fused" in names:
                self._unhook(optimizer, "fused")
                _place_steps(optimizer, fused=False)
                vars(optimizer).pop("_need_device_dtype_check_for_fused", None)  # noted by the fused update
            for name in names:
                flags.pop(name, None)
            if not flags:
                self._unhook(optimizer, "groups")
                del self._flags[optimizer]

    def _unhook(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        for handle in self._handles.get(optimizer, {}).pop(name, []):
            handle.remove()

    def _show_own_flags(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """A checkpoint that is written within an update, or after one that raised, has the script's own flags.

        The groups themselves stay as they are: the checkpoint may be another thread's, in the middle of an update.
        Hooks of the script's own come later, and may make of it what they will.
        """
        for group, own in tuple(self._own):
            for present, shown in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
                if present is group:
                    _put_back(shown, own)

    def num_optimizers(self, name: str) -> int:
        """Optimizers for which the flag is engaged."""
        return sum(bool(flags.get(name)) for flags in self._flags.values())

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to update: its groups carry the flags."""
        flags = self._flags.get(optimizer) if self._flags else None
        if not flags:
            return
        self.after_update()  # of an update that raised
        self.num_updates += 1
        for group in optimizer.param_groups:
            # what the script has given it since, and with which the kernel does not bear: plain does without
            if ("foreach" in flags and _has_tensors(group)) or (
                "fused" in flags and not all(map(_is_dense, group["params"]))
            ):
                continue
            self._own.append((group, {name: group.get(name, _MISSING) for name in flags}))
            group.update(flags)

    def after_update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """It has updated: its groups are the script's own again."""
        if not self._own:
            return
        for group, own in self._own:
            _put_back(group, own)
        self._own.clear()


def _put_back(group: Group, own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if value is _MISSING:
            group.pop(name, None)
        else:
            group[name] = value


def _align(optimizer: torch.optim.Optimizer) -> None:
    """Give moments and gradients the memory layout of their parameter: a fused kernel pairs them as they lie."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, optimizer.state.get(parameter, {})
                if gradient is not None and gradient.stride() != parameter.stride():
                    parameter.grad.data = torch.empty_like(parameter).copy_(gradient)
                for key, value in state.items():
                    moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    if moment and value.stride() != parameter.stride():
                        state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _place_steps(optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
    """Put step counters where a fused update (or a plain one) makes them itself, in the type that it gives them."""
    for parameter, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, torch.Tensor):
            device = parameter.device if fused else "cpu"
            state["step"] = step.to(device=device, dtype=torch.float32 if fused else _plain_dtype())


def _show_plain_steps(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Step counters in a checkpoint lie on the CPU in plain's type, as without us."""
    state = dict(state_dict["state"])
    for number, kept in state.items():
        if isinstance(kept, dict) and isinstance(kept.get("step"), torch.Tensor):
            state[number] = {**kept, "step": kept["step"].to(device="cpu", dtype=_plain_dtype())}
    return {**state_dict, "state": state}


def _plain_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
