"""How is PyTorch's `fully_shard` used on groups that are nobody's default, without a trace on the script's modules?

PyTorch looks groups up by name, so ours get one. Classes of modules, hooks and marks are taken off again; what was made
is given to who puts the hooks back for the time of a call. In: a module and which of its modules are called. Out: parts
that are gathered one after the other, a `DeviceMesh`, PyTorch's states.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.device_mesh
from torch import nn
from torch.distributed import distributed_c10d, fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp._fully_shard import _fsdp_state

from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.seams.blocks import repeated_blocks
from flatout.records.ranks import SUM_OF_GRADIENTS

MOST_SHARE = 0.25
"""Share of the parameters up to which a part that is not repeated is gathered as a whole."""

FEWEST_BYTES = 1 << 20
"""Smaller parts are gathered with what is around them. Source: the first bucket of DistributedDataParallel."""


def units(module: nn.Module, called: Collection[int]) -> list[nn.Module]:
    """The parts of a module that are gathered by themselves, of those that are called; the rest goes with it."""
    blocks = [block for group in repeated_blocks(module) for block in group]
    found = [block for block in blocks if id(block) in called]
    found += _others(module, {id(inner) for block in found for inner in block.modules()}, _num_bytes(module), called)
    return [one for one in found if one is not module and not _shares(one, module)]


def _others(module: nn.Module, taken: Collection[int], whole: int, called: Collection[int]) -> Iterator[nn.Module]:
    for child in module.children():
        inner = [one for one in child.modules() if id(one) in taken]
        size = _num_bytes(child)
        if id(child) in taken or size < FEWEST_BYTES:
            continue
        if not inner and size <= MOST_SHARE * whole and id(child) in called:
            yield child
        else:
            yield from _others(child, taken, whole, called)


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _shares(part: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of the part is used elsewhere, too."""
    own = {id(one) for one in part.modules()}
    mine = {id(p) for p in part.parameters()}
    return any(
        id(p) in mine
        for other in module.modules() if id(other) not in own for p in other._parameters.values() if p is not None
    )  # fmt: skip


c10d: Any = distributed_c10d  # whose tables are private
device_mesh: Any = torch.distributed.device_mesh


class Mesh:
    """The ranks: those that share a parameter with this one, and those that hold copies, None where all ranks share."""

    def __init__(self, group: Group, device: torch.device, sharing: Group, copies: Group | None) -> None:
        self.sharing = sharing
        self.numbers = itertools.count()
        """Of the parameters that are cut over it, the same on all ranks."""
        groups = [sharing] if copies is None else [copies, sharing]
        for one in groups:
            one.serve(device)
        device_mesh.get_rank = lambda *_: group.rank  # its own name for it, which scripts do not use
        ranks = torch.arange(group.world)
        self.devices = device_mesh.DeviceMesh(
            device.type,
            ranks if copies is None else ranks.view(-1, sharing.world),
            mesh_dim_names=None if copies is None else ("replicate", "shard"),
            _init_backend=False,
            _rank=group.rank,
        )
        self.devices._dim_group_names = [_registered(one) for one in groups]


def _registered(group: Group) -> Any:
    """Give a group a name by which PyTorch finds it."""
    name, processes, world = f"flatout-{group.name}", group.processes, c10d._world
    if processes not in world.pg_names:
        processes._set_group_name(name)
        world.pg_map[processes] = ("gloo", group.store)
        world.pg_names[processes] = name
        world.pg_group_ranks[processes] = {rank: place for place, rank in enumerate(group.ranks)}
        world.pg_backend_config[processes] = "cpu:gloo,cuda:nccl"
        world.pg_to_tag[processes] = f"user:{name}"
        world.tags_to_pg.setdefault(f"user:{name}", []).append(processes)
        c10d._register_process_group(name, processes)
    return world.pg_names[processes]


def forget() -> None:
    """Take all names back: nothing is exchanged any more."""
    world = c10d._world
    device_mesh.get_rank = c10d.get_rank
    for processes in [one for one, name in world.pg_names.items() if str(name).startswith("flatout-")]:
        for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
            table.pop(processes, None)
        world.tags_to_pg.pop(world.pg_to_tag.pop(processes, ""), None)
        c10d._unregister_process_group(world.pg_names.pop(processes))


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
