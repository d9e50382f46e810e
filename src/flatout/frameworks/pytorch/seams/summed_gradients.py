"""What do the gradients of several batches come to, whatever a script does with `.grad` between them?

They are summed in memory of our own, as the script hands them to its optimizer: cleared, unscaled or clipped as it does
that, and added up by itself where it does. Each counts for its part, so what is kept is never larger than a gradient.
In: the parameters of one optimizer. Out: their `.grad`, made the mean just before an update. That takes the memory of
one more gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SummedGradients:
    """Of one optimizer, since its last update.

    Attributes:
        num: Batches whose gradients are in it.
    """

    def __init__(self, part: float) -> None:
        self.num = 0
        self._part = part
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients that stand there now, as one batch's."""
        into: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for parameter in parameters:
            gradient, summed = parameter.grad, self._sums.get(parameter)
            if gradient is None:
                continue
            if summed is None:
                self._sums[parameter] = gradient.detach() * self._part
            elif _is_dense(gradient) and _is_dense(summed):
                into.append(summed)
                added.append(gradient.detach())
            else:  # sparse ones have no place where another could be added
                self._sums[parameter] = summed + gradient.detach() * self._part
        if into:
            torch._foreach_add_(into, added, alpha=self._part)
        self.num += 1

    @torch.no_grad()
    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make the gradients that stand there the mean over all batches, this one included, and forget the others."""
        dense: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for parameter in parameters:
            gradient, summed = parameter.grad, self._sums.get(parameter)
            if gradient is None:
                if summed is not None:  # a fused update pairs elements as they lie
                    parameter.grad = torch.empty_like(parameter).copy_(summed) if _is_dense(summed) else summed
            elif _is_dense(gradient) and (summed is None or _is_dense(summed)):
                dense.append(gradient)
                if summed is not None:
                    into.append(gradient)
                    added.append(summed)
            else:
                mean = gradient.detach() * self._part
                parameter.grad = mean if summed is None else mean + summed
        if dense:
            torch._foreach_mul_(dense, self._part)
        if into:
            torch._foreach_add_(into, added)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.num = 0
        self._sums.clear()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
