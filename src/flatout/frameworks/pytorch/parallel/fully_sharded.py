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
        for name, told in (("_all_gather_comm", "parameters"), ("_reduce_scatter_comm", "sum of gradients")):
            if hasattr(each, name):
                setattr(each, name, _Named(getattr(each, name), group, told))
    for handle in handles:
        handle.remove()


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
        self._group.keep(*(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)))
        with self._group.named(self._name):
            return self._inner(*args, **kwargs)
