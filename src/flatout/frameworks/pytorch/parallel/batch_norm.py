"""How does batch normalisation see the whole batch, while each rank computes a part of it?

`torch.nn.SyncBatchNorm` computes on GPUs alone and is a module of another type. So the function that all modules of
batch normalisation call is replaced while a divided call runs: statistics are put together from those of all ranks,
the rest is PyTorch's own. In: a group. Out: `torch.nn.functional.batch_norm` over all ranks, within a context.

Source: Ioffe and Szegedy, arXiv 1502.03167; statistics of parts: Chan, Golub and LeVeque, 1983, "Algorithms for
computing the sample variance".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from flatout.frameworks.pytorch.parallel.group import Group


@contextmanager
def synchronised(group: Group) -> Iterator[None]:
    """Batch statistics are those of all ranks."""
    plain = F.batch_norm

    def batch_norm(  # noqa: PLR0913  as PyTorch's
        input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> torch.Tensor:  # fmt: skip
        if not training:
            return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        running = running_mean, running_var, momentum
        out: torch.Tensor = _Normalised.apply(input, weight, bias, group, running, eps, plain)
        return out

    F.batch_norm = batch_norm
    try:
        yield
    finally:
        F.batch_norm = plain


@contextmanager
def remembered() -> Iterator[None]:
    """Statistics are those that modules remember, in training as well; nothing is brought forward."""
    plain = F.batch_norm

    def batch_norm(
        input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if mean is None or var is None:
            raise ValueError("nothing is remembered")
        eps = named.get("eps", rest[2] if len(rest) > 2 else 1e-5)
        return plain(input, mean, var, weight, bias, False, 0.0, eps)

    F.batch_norm = batch_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.batch_norm = plain


class _Normalised(torch.autograd.Function):
    """Batch normalisation with the statistics of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group, running: Any, eps: float, plain: Any) -> Any:  # noqa: PLR0913
        """Normalise; running statistics are brought forward on every rank alike."""
        if torch.is_autocast_enabled(x.device.type):  # as autocast does for batch normalisation: its own type stays
            weight, bias = (None if t is None else t.float() for t in (weight, bias))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = x.numel() / x.shape[1]
        rows = group.gather(torch.cat([mean, variance, mean.new_tensor([count])]), "batch statistics")
        means, variances, counts = rows[:, : len(mean)], rows[:, len(mean) : -1], rows[:, -1:]
        num = counts.sum()
        mean = (means * counts).sum(0) / num
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / num
        _bring_forward(running, mean, variance, num)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), num)
        ctx.group = group
        return plain(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        """The gradients of input, weight and bias; those of the latter two are this rank's."""
        x, weight, mean, inverse, num = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = grad.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([wide.sum(dims), (wide * centred).sum(dims)])
        own = sums.clone()
        ctx.group.sum(sums, "gradients of batch statistics")
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        slope = sums[1] * inverse**2 / num
        found = (wide - (sums[0] / num).view(shape) - centred * slope.view(shape)) * scale.view(shape)
        of_weight = None if weight is None or not ctx.needs_input_grad[1] else (own[1] * inverse).to(weight.dtype)
        of_bias = own[0].to(mean.dtype) if ctx.needs_input_grad[2] else None
        return found.to(x.dtype), of_weight, of_bias, None, None, None, None


def _bring_forward(running: Any, mean: torch.Tensor, variance: torch.Tensor, num: torch.Tensor) -> None:
    running_mean, running_var, momentum = running
    # .data: as PyTorch's own, this is no change that a graph of an earlier call would trip over
    if running_mean is not None:
        running_mean.data.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = variance * (num / (num - 1))
        running_var.data.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
