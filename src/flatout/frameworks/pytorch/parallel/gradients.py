"""How do the gradients of parameters come to be those of the whole batch?

Within a divided call the module computes with aliases of its parameters, leaves that share their memory, and the
reducer of PyTorch's DistributedDataParallel sums the aliases' gradients over ranks, in buckets, beside the backward
pass. The parameters themselves get the sums from the call's node in the script's graph: so hooks of the script's own,
penalties that it adds to its loss, accumulated gradients and `torch.autograd.grad` see what one process sees. In: a
module. Out: its aliases in place for a call, and summed gradients, None for what no rank has used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.cuts import Tensors
from flatout.frameworks.pytorch.parallel.group import Group, dist
from flatout.frameworks.pytorch.parallel.protocol import Found, Leaves, ParameterHolder
from flatout.frameworks.pytorch.parallel.stand_ins import StandIns
from flatout.records.ranks import SUM_OF_GRADIENTS


@dataclass(slots=True)
class _Exchange:
    """One bucket under way."""

    leaves: list[torch.Tensor]
    views: list[torch.Tensor]
    """Of the bucket, one for each leaf, laid out as the leaf is."""
    bucket: torch.Tensor
    sent: torch.Tensor
    work: Any


class NarrowSums:
    """The exchanges of one reducer. It does not hold the reducer, which holds it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._begun: list[_Exchange] = []

    def forget(self) -> None:
        """What a backward pass that raised has begun is of no use."""
        self._begun.clear()

    def begin(self, _: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum a bucket, as the reducer's hook; what it hands to the leaves meanwhile is not summed yet."""
        whole: torch.Tensor = bucket.buffer()
        sent = self._group.communication.to_send(whole)
        work = self._group.processes.allreduce([sent])
        self._begun.append(_Exchange(bucket.parameters(), bucket.gradients(), whole, sent, work))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(whole)
        return done

    def end(self) -> None:
        """Wait for all sums; the leaves' gradients are the mean over ranks then."""
        begun, self._begun = self._begun, []
        self._group.keep(*(one.sent for one in begun))
        for one in begun:
            one.work.wait()
            if one.sent.is_cuda:  # it was made on the stream of the backward pass, and is read on this one
                one.sent.record_stream(torch.cuda.current_stream(one.sent.device))
            one.bucket.copy_(one.sent).div_(self._group.world)
            for leaf, view in zip(one.leaves, one.views, strict=True):
                assert leaf.grad is not None
                leaf.grad.copy_(view)


class Summing:
    """Sums the gradients of some leaves, at least one, in the order of their use: gradients come in the reverse one."""

    def __init__(self, leaves: Sequence[nn.Parameter], group: Group) -> None:
        self._leaves, self._group = leaves, group
        self._uses = nn.Parameter(leaves[0].new_zeros(len(leaves), requires_grad=False))
        self._all_used = torch.ones_like(self._uses)
        for leaf in leaves:
            group.serve(leaf.device)
        backwards = [*leaves[::-1], self._uses]
        dense = [False] * len(backwards)
        first, most = group.communication.bucket_bytes
        buckets, limits = dist._compute_bucket_assignment_by_size(
            backwards, [first, most], dense, list(range(len(backwards)))
        )
        self._reducer = dist.Reducer(
            backwards, buckets, limits, group.processes, dense, most,
            False,  # it does not look for what is unused
            False,  # gradients are the leaves' own, no views of buckets
            first_bucket_bytes_cap=first,
        )  # fmt: skip
        self._narrow = NarrowSums(group) if group.communication.in_bf16 else None
        if self._narrow is not None:
            dist._register_comm_hook(self._reducer, None, self._narrow.begin)

    def gone_back(self, outputs: Tensors, gradients: Tensors, *, keep: bool) -> Found:
        """Go back from outputs that were computed here: the mean over ranks of the gradients of the leaves."""
        if self._narrow is not None:
            self._narrow.forget()
        with self._group.named(SUM_OF_GRADIENTS, waiting=False):
            self._reducer._rebuild_buckets()  # once, in the order in which gradients have come
            self._reducer.prepare_for_backward([])
            if outputs:
                torch.autograd.backward(list(outputs), list(gradients), retain_graph=keep)
        with self._group.named(SUM_OF_GRADIENTS):  # what the way back has not hidden
            unused = [leaf for leaf in self._leaves if leaf.grad is None]
            flags = self._all_used
            if unused:  # 1 for each leaf that has a gradient, else 0
                flags = flags.new_tensor([leaf.grad is not None for leaf in self._leaves])
            torch.autograd.backward([self._uses, *unused], [flags, *map(torch.zeros_like, unused)])
            if self._narrow is not None:
                self._narrow.end()
        assert self._uses.grad is not None
        shares = self._uses.grad.tolist() if unused else [1.0] * len(self._leaves)
        found = [leaf.grad if share else None for leaf, share in zip(self._leaves, shares, strict=True)]
        for leaf in (*self._leaves, self._uses):
            leaf.grad = None
        return found


def summed_in_buckets(tensors: Tensors, group: Group, name: str) -> Iterator[torch.Tensor]:
    """Sums over ranks, several tensors in one exchange."""
    bucket: list[torch.Tensor] = []
    most = group.communication.bucket_bytes[1]
    for number, tensor in enumerate(tensors):
        bucket.append(tensor)
        following = tensors[number + 1] if number + 1 < len(tensors) else None
        is_full = sum(one.numel() * one.element_size() for one in bucket) >= most
        if following is None or is_full or (following.dtype, following.device) != (tensor.dtype, tensor.device):
            flat = torch.cat([one.reshape(-1) for one in bucket])
            sent = group.communication.to_send(flat) if group.communication.narrows(flat.dtype) else flat
            whole = group.sum(sent, name).to(flat.dtype).split([one.numel() for one in bucket])
            yield from (one.view(like.shape).clone() for one, like in zip(whole, bucket, strict=True))
            bucket = []


class Aliases(ParameterHolder):
    """The parameters of one module, whole on every rank, and their stand-ins."""

    takes_mean = True

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._stand_ins = StandIns(module)
        self._group = group
        self._summings: dict[tuple[bool, ...], Summing] = {}

        self.parameters = self._stand_ins.parameters

    def renew(self) -> None:
        """See `ParameterHolder`."""
        if self._stand_ins.renew():
            self.parameters = self._stand_ins.parameters
            self._summings.clear()

    @property
    def used(self) -> list[nn.Parameter]:
        """The stand-ins of the parameters that are trained."""
        return self._stand_ins.used

    @property
    def leaves(self) -> list[torch.Tensor]:
        """See `ParameterHolder`."""
        return list(self.used)

    def in_place(self) -> AbstractContextManager[None]:
        """See `ParameterHolder`."""
        return self._stand_ins.in_place()

    @contextmanager
    def in_whole(self) -> Iterator[Leaves]:
        """See `ParameterHolder`."""
        with self.in_place():
            yield self.used

    def close(self) -> None:
        """See `ParameterHolder`."""
        self._summings.clear()

    def backward(self, outputs: Tensors, gradients: Tensors, *, keep: bool) -> Found:
        """See `ParameterHolder`.

        The reducer takes the mean over ranks. A hook of ours in its place would run in a thread that may still need
        the interpreter when the process ends, and abort it.
        """
        if not self.used:  # a critic that is kept from training lets gradients through
            if outputs:
                torch.autograd.backward(outputs, gradients, retain_graph=keep)
            return [None for _ in self.parameters]
        trained = [parameter.requires_grad for parameter in self.parameters]  # some may be switched off and on
        which = (*trained, self._group.communication.in_bf16)
        if which not in self._summings:
            self._summings[which] = Summing(self.used, self._group)
        summed = iter(self._summings[which].gone_back(outputs, gradients, keep=keep))
        return [next(summed) if is_trained else None for is_trained in trained]
