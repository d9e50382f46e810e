"""How are gradients summed as bfloat16 beside a backward pass, in half of the bytes?

A hook of PyTorch's reducer begins the exchange of each bucket; it is waited for after the backward pass, by the thread
that went back. PyTorch's own `bf16_compress_hook` goes on in a callback of the exchange instead, which with gloo runs
in a thread that may still hold Python objects when the interpreter ends, and aborts the process. In: buckets. Out: the
mean over ranks in the gradients of their leaves.

A gradient is rounded once before it is sent, and sums are rounded to bfloat16 at each rank; the mean is taken of the
sum, in float32. (`bf16_compress_hook` divides what it sends, one rounding more where the world is no power of two.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group


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
