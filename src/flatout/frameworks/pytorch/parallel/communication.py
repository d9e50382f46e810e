"""How are gradients sent between ranks: in buckets of which size, how wide, and what came of it?

In: what levers say before the first divided call. Out: the same for those who sum, and counts for the levers' proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Source: `torch.nn.parallel.DistributedDataParallel`, its defaults."""

EVERYTHING_BYTES = 1 << 46
"""A bucket of this size holds any model."""


class Communication:
    """What all sums of gradients of a run have in common.

    Attributes:
        bucket_bytes: Size of the buckets; 0 for a single one, None for PyTorch's own sizes.
        in_bf16: Whether float32 gradients are sent and summed as bfloat16.
        num_buckets: Buckets of the model that has most of them.
        num_bytes: Bytes of gradients that were to be summed as bfloat16.
        num_sent_bytes: Bytes as which they were sent.
    """

    def __init__(self) -> None:
        self.bucket_bytes: int | None = None
        self.in_bf16 = False
        self.num_buckets = 0
        self.num_bytes = self.num_sent_bytes = 0

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes of the first bucket, which is to be under way early, and of the others."""
        if self.bucket_bytes is None:
            return FIRST_BUCKET_BYTES, BUCKET_BYTES
        if not self.bucket_bytes:
            return EVERYTHING_BYTES, EVERYTHING_BYTES
        return min(FIRST_BUCKET_BYTES, self.bucket_bytes), self.bucket_bytes

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Within, gradients are summed as they are: to be compared with those of one process."""
        former, self.in_bf16 = self.in_bf16, False
        try:
            yield
        finally:
            self.in_bf16 = former

    def narrows(self, dtype: torch.dtype | None) -> bool:
        """Whether gradients of this type are sent narrower: others are narrow already, or meant to be wide."""
        return self.in_bf16 and dtype == torch.float32

    def to_send(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is sent of a tensor in its place: bfloat16, or a copy."""
        if not self.narrows(tensor.dtype):
            return tensor.clone()
        sent = tensor.to(torch.bfloat16)
        self.note(sent)
        return sent

    def note(self, sent: torch.Tensor) -> None:
        """Something was sent as bfloat16 that is float32."""
        self.num_sent_bytes += sent.numel() * sent.element_size()
        self.num_bytes += sent.numel() * torch.float32.itemsize
