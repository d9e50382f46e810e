"""What does a transfer ask of a device? Streams, events, page-locked memory, and nothing else.

This is all that the rest of this package knows of CUDA; the tests put a device in its place whose streams run when
they say. In: a `torch.device` as a script names it. Out: a `Device`, or None where it is none of CUDA's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class Device:
    """A CUDA device with two streams: the one that is current where the script computes, and one beside it for copies.

    Its page-locked memory comes from PyTorch's own allocator, which gives none out again before the copies from it are
    done; its streams do not wait for the legacy default stream.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._beside = torch.cuda.Stream(self._device)

    def capturing(self) -> bool:
        """Whether a graph is being captured, so that nothing may be waited for."""
        return torch.cuda.is_current_stream_capturing()

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in page-locked memory."""
        staged = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, pin_memory=True)
        return staged.copy_(like)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in page-locked memory."""
        return tensor.is_pinned()

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total_bytes(self) -> int:
        """Memory of the device."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def num_retries(self) -> int:
        """Times that the allocator gave all back that was free, because nothing fitted."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_alloc_retries", 0))

    def beside(self) -> AbstractContextManager[Any]:
        """Inside, the stream beside is the current one: what is made and copied belongs to it."""
        return torch.cuda.stream(self._beside)

    def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device, from the pool of the current stream."""
        return torch.empty_strided(size, stride, dtype=dtype, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have the current stream copy page-locked memory."""
        target.copy_(source, non_blocking=True)

    def gather(self, target: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Have the current stream take rows."""
        torch.index_select(rows, 0, places, out=target)

    def scatter(self, rows: torch.Tensor, places: torch.Tensor, source: torch.Tensor) -> None:
        """Have the current stream put rows."""
        rows.index_copy_(0, places, source)

    def record(self) -> torch.cuda.Event:
        """The point that the current stream has been told to reach by now."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Have the current stream wait for an event; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def in_use(self, tensor: torch.Tensor) -> None:
        """The current stream uses a tensor of another stream's pool: its memory is free once that stream is past it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


class CudaDevices:
    """The devices of this process, each made when a script first names it."""

    def __init__(self) -> None:
        self._found: dict[int, Device] = {}

    def __call__(self, named: torch.device) -> Device | None:
        """The device that a script means; None where it is none of CUDA's, or the script has not begun to use CUDA."""
        if named.type != "cuda" or not torch.cuda.is_initialized():
            return None
        index = torch.cuda.current_device() if named.index is None else named.index
        if index not in self._found:
            self._found[index] = Device(index)
        return self._found[index]
