"""How is `fully_shard` used without a trace on the script's modules?

Their classes, the hooks and the marks that it leaves are taken off again; what it made is given to who puts the hooks
back for the time of a call. In: a module and its parts. Out: PyTorch's states of them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp._fully_shard import _fsdp_state

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.mesh import Mesh
from flatout.records.ranks import SUM_OF_GRADIENTS

MARKS = (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What `fully_shard` leaves in a module's `__dict__`, where pickles and copies of the script's would find it."""


def fully_sharded(module: nn.Module, parts: Sequence[nn.Module], mesh: Mesh, rest: set[nn.Parameter]) -> list[Any]:
    """Shard the parts and the module; the states of PyTorch's, the module's last, without a trace on any module."""
    every = [*parts, module]
    kinds = [type(one) for one in every]
    words: dict[str, Any] = {"mesh": mesh.devices}
    if rest and "ignored_params" in inspect.signature(fsdp.fully_shard).parameters:
        words["ignored_params"] = rest
    for one in every:
        fsdp.fully_shard(one, **words)
    states = [_fsdp_state._get_module_fsdp_state(one) for one in every]
    states[-1]._lazy_init()  # type: ignore[union-attr]
    for one, kind in zip(every, kinds, strict=True):
        one.__class__ = kind
    for part in module.modules():
        for mark in MARKS:
            vars(part).pop(mark, None)
    for state in states:
        _take_hooks_off(state, mesh.sharing)
    return states


def groups_of(state: Any) -> list[Any]:
    """What is gathered together: PyTorch had one such group before it had several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _take_hooks_off(state: Any, group: Group) -> None:
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for each in groups_of(state):
        handles += [*each._module_to_pre_save_state_dict_hook_handle.values()]
        handles += [*each._module_to_pre_load_state_dict_hook_handle.values()]
        handles += [one._post_load_hook_handle for one in each.fsdp_params]
        for name, told in (("_all_gather_comm", "parameters"), ("_reduce_scatter_comm", SUM_OF_GRADIENTS)):
            if hasattr(each, name):
                setattr(each, name, _Named(getattr(each, name), group, told))
    for handle in handles:
        handle.remove()


def set_sums(groups: Sequence[Any], group: Group) -> set[int]:
    """Have gradients be summed as is said now; PyTorch's parameters, by identity, whose sum is left to be divided.

    What `MixedPrecisionPolicy(reduce_dtype=...)` says once is said for each way back, for some are compared. PyTorch
    takes the mean in the type that is sent: of bfloat16 the sum is taken instead, and the mean of that in float32.
    """
    sums: set[int] = set()
    for one in groups:
        is_narrow = group.communication.narrows(one._orig_dtype)
        one._reduce_dtype = torch.bfloat16 if is_narrow else None
        if hasattr(one, "force_sum_reduction_for_comms"):  # not before PyTorch 2.8: there the mean is in bfloat16
            one.force_sum_reduction_for_comms = is_narrow
            one.gradient_divide_factor = 1.0 if is_narrow else None
            sums.update(map(id, one.fsdp_params) if is_narrow else ())
    return sums


def silently(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of PyTorch's without its warnings: they are about writing into what it returns, which a script cannot."""

    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return hook(*args)

    return call


class _Named:
    """An exchange of PyTorch's, with a name and an end that are ours."""

    def __init__(self, inner: Any, group: Group, name: str) -> None:
        self._inner, self._group, self._name = inner, group, name

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Memory for it."""
        found: torch.Tensor = self._inner.allocate(*args, **kwargs)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        self._group.keep(*tensors)
        if self._name == SUM_OF_GRADIENTS and self._group.communication.in_bf16:
            self._group.communication.note(max(tensors, key=torch.numel))
        with self._group.named(self._name):
            return self._inner(*args, **kwargs)
