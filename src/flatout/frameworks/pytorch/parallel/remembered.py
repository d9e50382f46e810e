"""What does a module know of earlier calls, and is it the same after another way of computing one?

In: a module. Out: its buffers and the tensors that it keeps as attributes; whether others are alike.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase

from flatout.frameworks.pytorch.parallel.assembly import is_close


def remembered(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a module knows of earlier calls: buffers, and tensors that it keeps as attributes, by name."""
    found = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not value.requires_grad and not value.is_meta:
                found[f"{prefix}.{name} "] = value.detach().clone()
    return found


def is_remembered(wanted: dict[str, torch.Tensor], module: torch.nn.Module) -> bool:
    """Whether a module knows what was remembered."""
    found, averaged = remembered(module), _averaged(module)
    return found.keys() == wanted.keys() and all(
        is_close(found[name], wanted[name], rounded=averaged.get(name, 0.0)) for name in wanted
    )


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
