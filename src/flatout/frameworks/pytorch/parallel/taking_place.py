"""How does a parameter of the script's move into the memory of its shard, and stay the same object?

In: a parameter and PyTorch's shard of it. Out: the parameter as `Sharded`; or a refusal, where somebody holds on to
the memory that it leaves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.answers import hook_of_wholes
from flatout.frameworks.pytorch.parallel.portions import REPLICATE, Portions
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded import become


class ShardMemory:
    """Where a parameter's rows lie: in PyTorch's own shard, whose memory is a little longer where rows do not go up."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def moved(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in memory of their own, from where they are gathered from now on."""
        held = self._held
        padded = rows.new_zeros(held.padded_sharded_param_size)
        mine = padded.narrow(0, 0, rows.shape[0]).copy_(rows)
        held._sharded_param_data = padded.view(-1)
        held.sharded_param._local_tensor = mine
        return mine


def _num_sharing(tensor: torch.Tensor) -> int:
    """How many tensors lie in its memory, and those that count."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


@functools.cache
def _num_sharing_of_one() -> int:
    """The same of a parameter that nobody shares but its stand-in (`gradients.py`)."""
    alone = nn.Parameter(torch.zeros(1))
    stand_in = nn.Parameter(alone.detach())
    num = _num_sharing(alone)
    del stand_in
    return num


def take_place(parameter: nn.Parameter, part: torch.Tensor, portions: Portions, memory: Any) -> None:
    """The script's parameter moves into the memory of its part.

    Args:
        parameter: Whole until now.
        part: This rank's.
        portions: Which that is.
        memory: Told where the part is to lie from now on (`moved`).

    Raises:
        NotDivided: Somebody holds on to where it was.
    """
    if _num_sharing(parameter) > _num_sharing_of_one():
        raise NotDivided(
            "a parameter cannot be sharded: its memory is shared with another tensor",
            cause=f"one of shape {tuple(parameter.shape)} is shared with another tensor that the script keeps "
            "(`p.data`, a state dict, a view), which would not follow it",
            hint=f"copy what is kept before training (`copy.deepcopy`); or {REPLICATE}",
        )
    grad, parameter.grad = parameter.grad, None
    parameter.data = part
    accumulates = parameter.view_as(parameter).grad_fn
    before = accumulates is not None and accumulates.next_functions[0][0]
    if before and tuple(before._input_metadata[0].shape) != tuple(parameter.shape):  # type: ignore[union-attr]
        raise NotDivided(
            "a parameter cannot be sharded: a graph hangs from it already",
            cause=f"something was computed from one of shape {tuple(portions.shape)} before the first call of "
            "the model",
            hint=f"compute penalties after the model's call; or {REPLICATE}",
        )
    hooks = parameter._backward_hooks
    for key, hook in (hooks or {}).items():
        hooks[key] = hook_of_wholes(hook, portions)  # type: ignore[index]
    become(parameter, portions, memory)
    if grad is not None:
        parameter.grad = grad
