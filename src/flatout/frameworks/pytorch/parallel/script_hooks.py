"""Which hooks has a script put on the modules of a model? PyTorch's own (`weight_norm`) belong to the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Those on a module, around its calls and their way back."""
    for hooks in (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    ):  # fmt: skip
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch."):
                yield hook


def has_hooks(module: nn.Module) -> bool:
    """Whether there are some."""
    return next(hooks_of(module), None) is not None


def inner_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Those on modules within it: they see what a rank computes."""
    for part in module.modules():
        if part is not module:
            yield from hooks_of(part)


def is_hooked(module: nn.Module) -> bool:
    """Whether there are hooks on modules within it."""
    return next(inner_hooks(module), None) is not None
