"""How are gradients summed over ranks beside a backward pass, and which leaves has any rank used?

The reducer of PyTorch's DistributedDataParallel sums in buckets, each as soon as its gradients are there. It can find
out by itself which leaves a graph does not use; that costs a walk through the graph and one more exchange in each step.
So here every leaf gets a gradient, if only zeros, and who used what is summed along, as the gradient of one more leaf.
In: leaves and a backward pass. Out: their gradients, None for what no rank has used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group, dist
from flatout.frameworks.pytorch.parallel.held import Found
from flatout.frameworks.pytorch.parallel.narrow_sums import NarrowSums
from flatout.records.ranks import SUM_OF_GRADIENTS


class Summing:
    """Sums the gradients of some leaves.

    Args:
        leaves: At least one, in the order of their use: gradients come in the reverse one.
        group: All ranks.
    """

    def __init__(self, leaves: Sequence[nn.Parameter], group: Group) -> None:
        self._leaves, self._group = leaves, group
        self._uses = nn.Parameter(leaves[0].new_zeros(len(leaves), requires_grad=False))
        self._all_used = torch.ones_like(self._uses)
        for leaf in leaves:
            group.serve(leaf.device)
        backwards = [*leaves[::-1], self._uses]
        dense = [False] * len(backwards)
        first, most = group.communication.limits
        buckets, limits = dist._compute_bucket_assignment_by_size(
            backwards, [first, most], dense, list(range(len(backwards)))
        )
        self._reducer = dist.Reducer(
            backwards, buckets, limits, group.processes, dense, most,
            False,  # it does not look for what is unused
            False,  # gradients are the leaves' own, no views of buckets
            first_bucket_bytes_cap=first,
        )  # fmt: skip
        group.communication.num_buckets = max(group.communication.num_buckets, len(buckets))
        self._narrow = NarrowSums(group) if group.communication.in_bf16 else None
        if self._narrow is not None:
            dist._register_comm_hook(self._reducer, None, self._narrow.begin)

    def gone_back(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, keep: bool) -> Found:
        """Go back from outputs: the mean over ranks of the gradients of the leaves.

        Args:
            outputs: What was computed from the leaves here.
            gradients: Theirs.
            keep: Whether the graph is gone through again.
        """
        if self._narrow is not None:
            self._narrow.forget()
        with self._group.named(SUM_OF_GRADIENTS, waiting=False):
            self._reducer._rebuild_buckets()  # once, in the order in which gradients have come
            self._reducer.prepare_for_backward([])
            if outputs:
                torch.autograd.backward(list(outputs), list(gradients), retain_graph=keep)
        with self._group.named(SUM_OF_GRADIENTS):  # what the way back has not hidden
            unused = [leaf for leaf in self._leaves if leaf.grad is None]
            zeros = [torch.zeros_like(leaf) for leaf in unused]
            torch.autograd.backward([self._uses, *unused], [self._all_used if not unused else self._flags(), *zeros])
            if self._narrow is not None:
                self._narrow.end()
        nowhere = self._used_nowhere() if unused else frozenset()
        found = [None if place in nowhere else leaf.grad for place, leaf in enumerate(self._leaves)]
        for leaf in (*self._leaves, self._uses):
            leaf.grad = None
        return found

    def _flags(self) -> torch.Tensor:
        """1 for each leaf that has a gradient, else 0."""
        return self._all_used.new_tensor([leaf.grad is not None for leaf in self._leaves])

    def _used_nowhere(self) -> frozenset[int]:
        """The leaves that have got zeros on all ranks."""
        assert self._uses.grad is not None
        return frozenset(place for place, share in enumerate(self._uses.grad.tolist()) if not share)


def summed_in_buckets(tensors: Sequence[torch.Tensor], group: Group, name: str) -> Iterator[torch.Tensor]:
    """Sums over ranks, several tensors in one exchange."""
    bucket: list[torch.Tensor] = []
    most = group.communication.limits[1]
    num_buckets = 0
    for number, tensor in enumerate(tensors):
        bucket.append(tensor)
        following = tensors[number + 1] if number + 1 < len(tensors) else None
        is_full = sum(one.numel() * one.element_size() for one in bucket) >= most
        if following is None or is_full or (following.dtype, following.device) != (tensor.dtype, tensor.device):
            yield from _cut(_summed(torch.cat([one.reshape(-1) for one in bucket]), group, name), bucket)
            bucket, num_buckets = [], num_buckets + 1
    group.communication.num_buckets = max(group.communication.num_buckets, num_buckets)


def _summed(flat: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    """The sum over ranks: in place, or of what is sent in its place."""
    if not group.communication.narrows(flat.dtype):
        return group.sum(flat, name)
    return group.sum(group.communication.to_send(flat), name).to(flat.dtype)


def _cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    start = 0
    for one in like:
        yield flat[start : start + one.numel()].view(one.shape).clone()
        start += one.numel()
