"""Which hooks has a script put on a module, and on those within it? PyTorch's own (`weight_norm`) are the module's.

In: a module. Out: functions that are called around its calls and their way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Those on a module itself."""
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


def has_inner_hooks(module: nn.Module) -> bool:
    """Whether there are hooks on modules within it."""
    return next(inner_hooks(module), None) is not None
