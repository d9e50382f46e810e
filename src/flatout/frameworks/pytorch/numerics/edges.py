"""Does a lever stay finite where plain does, at inputs that training meets rarely?

The captured calls are replayed once more with their first example set to zero (or to one value throughout, where it is
made of numbers of things) and their last made ten thousand times as large. On a GPU the last is left alone: a value
that becomes an index there ends the process, not the call. Only whether NaN or infinity appears is looked at. In:
captured calls and the engaged levers. Out: yes or no. Loaded in trials only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.replay import Replayer
from flatout.frameworks.pytorch.seams.trees import map_tensors

LARGE = 1e4


def rare_inputs(replayer: Replayer, calls: Sequence[CapturedCall]) -> list[list[CapturedCall]]:
    """The calls at rare inputs at which plain stays finite: extreme in both ways, else each way that plain bears."""
    both = _changed(calls, zero=True, large=True)
    if _bears(replayer, both):
        return [both]
    each = [_changed(calls, zero=True, large=False), _changed(calls, zero=False, large=True)]
    return [one for one in each if _bears(replayer, one)]


def finite_at(replayer: Replayer, rare: Sequence[list[CapturedCall]]) -> bool:
    """Whether the engaged levers stay finite at them."""
    return all(replayer.run(calls, levers=True).finite for calls in rare)


def _bears(replayer: Replayer, calls: list[CapturedCall]) -> bool:
    try:
        return replayer.run(calls).finite
    except Exception:  # noqa: BLE001  a model may refuse such inputs in any way
        return False


def _changed(calls: Sequence[CapturedCall], *, zero: bool, large: bool) -> list[CapturedCall]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 1 or tensor.shape[0] < 2 or tensor.layout is not torch.strided or tensor.dtype == torch.bool:
            return tensor
        rare = tensor.detach().clone()
        if zero:
            rare[0] = 0 if tensor.is_floating_point() else rare[0].reshape(-1)[0]
        if large and tensor.is_floating_point() and tensor.device.type == "cpu":
            rare[-1] *= LARGE
        return rare.requires_grad_(tensor.requires_grad)

    return [
        c.changed(args=map_tensors(change, c.args, objects=False), kwargs=map_tensors(change, c.kwargs, objects=False))
        for c in calls
    ]
