"""How does a rank hold some rows of each parameter, and compute with whole ones?

PyTorch's fully sharded data parallelism gathers the parameters of one part of the model after the other, and scatters
summed gradients. It is kept within divided calls: its hooks are on modules for the time of a call, and between calls
modules hold the script's own parameters, which have become `Sharded` in the memory of its shards. In: a module and the
modules that training calls in it. Out: its parameters held by rows.

Source: `torch.distributed.fsdp.fully_shard`; Zhao et al., arXiv 2304.11277; Rajbhandari et al., arXiv 1910.02054.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.cuts import Tensors
from flatout.frameworks.pytorch.parallel.fully_sharded import Mesh, fully_sharded, groups_of, set_sums, silently, units
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.protocol import Found, Leaves, ParameterHolder
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import Sharded, become, can_be_cut, in_rows
from flatout.frameworks.pytorch.parallel.stand_ins import refuse_others, take_place

Refuse = Callable[[NotDivided], Any]


class Shards(ParameterHolder):
    """The parameters of one module, of each some rows; they are sharded now, by the modules that a call of it calls."""

    takes_mean = True

    def __init__(self, module: nn.Module, mesh: Mesh, group: Group, called: Collection[int], refuse: Refuse) -> None:
        self._module, self._group = module, group
        owners = {
            (id(part), name): p
            for part in module.modules() for name, p in part._parameters.items() if p is not None
        }  # fmt: skip
        rest = {p for p in owners.values() if not can_be_cut(p)}
        self._states = fully_sharded(module, units(module, called), mesh, rest)
        self._groups = [group for state in self._states for group in groups_of(state)]
        every = [one for each in self._groups for one in each.fsdp_params]
        self._held = {id(owners[id(one._module_info.module), one._module_info.param_name]): one for one in every}
        self.parameters = list({id(p): p for p in owners.values()}.values())
        self._cut = [(p, self._held[id(p)]) for p in self.parameters if id(p) in self._held]
        self._rest = [p for p in self.parameters if id(p) not in self._held]
        for parameter, held in self._cut:
            rows = in_rows(parameter.shape, mesh.sharing, refuse, next(mesh.numbers))
            take_place(parameter, held.sharded_param._local_tensor, rows, functools.partial(_moved, held))
        self._used: set[int] = set()
        """Identities of the parameters that autograd has come to on the last way back."""
        self._noted: set[int] = set()
        self._versions: list[int] = []
        self._wanted: list[bool] = []
        self._depth = 0
        self._put_back()

    def renew(self) -> None:
        """Follow what the script has done to the parameters since the last call."""
        refuse_others(self._module, self.parameters)
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [p.requires_grad for p in self.parameters]
        if wanted != self._wanted:
            self._wanted = wanted
            for parameter, held in self._cut:
                held.sharded_param.requires_grad_(parameter.requires_grad)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What the graph of a call begins with: gathered parameters, and those that are not sharded."""
        gathered = [getattr(one, "_unsharded_param", None) for one in self._held.values()]
        return [*(one for one in gathered if one is not None), *self._rest]

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """All parameters are gathered, and stay so."""
        if self._depth:
            yield
            return
        self._depth = 1
        for group in self._groups:
            group.unshard()
            group.wait_for_unshard()
        try:
            yield
        finally:
            self._depth = 0
            self._reshard()
            self._put_back()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Modules gather their parameters when they are called."""
        if self._depth:
            yield
            return
        self._depth = 1
        hooks = []
        for state in self._states:
            part = state._modules[0]
            hooks.append(part.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True))
            hooks.append(part.register_forward_hook(silently(state._post_forward)))
        if self._versions != self._present_versions():  # updated since they were gathered
            self._reshard()
        for group in self._groups:
            if group.is_unsharded:
                for one in group.fsdp_params:
                    one._setattr_on_modules(one._unsharded_param)
        try:
            yield
        finally:
            self._depth = 0
            for hook in hooks:
                hook.remove()
            self._put_back()

    def evaluated(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `ParameterHolder`: nothing stays gathered."""
        with self.in_place():
            try:
                return compute(*args, **kwargs)
            finally:
                self._reshard()

    def _reshard(self) -> None:
        for group in self._groups:
            if group.is_unsharded:
                group._to_sharded()

    def _put_back(self) -> None:
        """Modules hold the script's own parameters again."""
        for parameter, held in self._cut:
            held._setattr_on_modules(parameter)
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [p._version for p in self.parameters]

    def backward(self, outputs: Tensors, gradients: Tensors, *, keep: bool) -> Found:
        """See `ParameterHolder`."""
        found = self._gone_back(outputs, gradients, keep=keep, all_used=True)
        used = self._group.anywhere([id(p) in self._used for p in self.parameters], "which parameters were used")
        return [one if was else None for one, was in zip(found, used, strict=True)]

    def _note_uses(self) -> None:
        """A parameter that no rank has used gets no gradient, as in one process: note what autograd comes to."""
        self._used.clear()
        for key, held in self._held.items():
            gathered = getattr(held, "_unsharded_param", None)
            if gathered is not None and gathered.requires_grad and key not in self._noted:
                self._noted.add(key)
                gathered.register_post_accumulate_grad_hook(lambda _, key=key: self._used.add(key))

    def gradients(self, outputs: Tensors, gradients: Tensors, leaves: Leaves) -> Found:
        """See `ParameterHolder`; the leaves are its own. No rank has a gradient that others lack."""
        del leaves
        with self._group.communication.in_full():
            found = self._gone_back(outputs, gradients, keep=False, all_used=False)
        return [one for p, one in zip(self.parameters, found, strict=True) if p.requires_grad]

    def _gone_back(self, outputs: Tensors, gradients: Tensors, *, keep: bool, all_used: bool) -> Found:
        for group in self._groups:
            group.reduce_scatter_unused_params = all_used
        sums = set_sums(self._groups, self._group)
        former = [p.grad for p in self._rest]
        for p in self._rest:
            p.grad = None
        for held in self._held.values():
            held.sharded_param.grad = None
        self._note_uses()
        torch.autograd.backward(list(outputs), list(gradients), retain_graph=keep)
        self._used.update(id(p) for p in self._rest if p.grad is not None)
        found: Found = [self._taken(p, sums) for p in self.parameters]
        for p, grad in zip(self._rest, former, strict=True):
            p.grad = grad
        return found

    def _taken(self, parameter: nn.Parameter, sums: Collection[int]) -> torch.Tensor | None:
        """The mean over ranks of the gradient that the way back has left; `sums`: what is no mean yet."""
        held = self._held.get(id(parameter))
        if held is None:
            if not parameter.requires_grad:
                return None
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return self._group.sum(own, "gradient of a single number").div_(self._group.world)
        grad, held.sharded_param.grad = held.sharded_param.grad, None
        assert isinstance(parameter, Sharded)
        if grad is None:
            return None
        mine = grad._local_tensor.div_(self._group.world) if id(held) in sums else grad._local_tensor
        return become(mine, parameter.placement)


def _moved(held: Any, rows: torch.Tensor) -> torch.Tensor:
    """A parameter's rows in memory of their own, PyTorch's shard, which is a little longer where rows do not go up."""
    padded = rows.new_zeros(held.padded_sharded_param_size)
    held._sharded_param_data = padded.view(-1)
    held.sharded_param._local_tensor = mine = padded.narrow(0, 0, rows.shape[0]).copy_(rows)
    return mine
