"""Which operations make up one step, and what does each compute and move?

A dispatch mode sees every operation of forward, backward and optimizer. In: one step under the mode. Out: a `Census`:
FLOPs by formula (matrix products and convolutions, two per multiply-add; see `flops`), bytes read and written, values
read back to the host with the line that asked for them.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from flatout.frameworks.pytorch.observe.flops import flops as flops_of
from flatout.frameworks.pytorch.observe.flops import recomputed
from flatout.frameworks.pytorch.seams.script_code import script_frame
from flatout.records.trace import Census, Operation

MOST_OPERATIONS = 40
"""Kept one by one; all are in the totals."""

UNCOUNTED_SHARE = 0.02
"""An operation without a FLOP formula is named where it takes more than this share of the time."""

DEVICE_RIDGE = 100.0
"""FLOPs that a device computes while it moves a byte, about: 20 in float32, 300 in 16 bits. The host's time of an
operation is what it takes to launch it there, so what is heavy is told by what it computes and moves."""

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
"""Operations whose result the host needs before it can go on."""

ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
"""Operations beside the views that neither read nor write: they take memory, or see it in another shape."""

UNREAD = {
    **dict.fromkeys(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"), 0),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "rand_like", "randn_like"), 0),
    **dict.fromkeys(("nll_loss_backward", "max_pool2d_with_indices_backward", "_adaptive_avg_pool2d_backward"), 1),
    "avg_pool2d_backward": 1,
}
"""Which tensor argument is only written, or only asked for its shape."""

LOOKED_UP = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Operations that read of their first tensor no more than they return."""


class OperationCounter(TorchDispatchMode):
    """Counts operations between `__enter__` and `__exit__`, which lie at step boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[tuple[str, str, str], list[float]] = {}
        self._places: Counter[str] = Counter()
        self._recomputed_flops = 0
        self._on_device = False
        self._views: set[str] = set()
        self._paused = False

    def pause(self) -> None:
        """Count no more: what follows is ours."""
        self._paused = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        begun_s = perf_counter()
        out = func(*args, **(kwargs or {}))
        took_s = perf_counter() - begun_s
        if not self._paused:
            self._note(func, args, kwargs or {}, out, took_s)
        return out

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, took_s: float) -> None:
        name = func._overloadpacket.__name__
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        results = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        flops = flops_of(func, args, kwargs, out)
        if flops:
            self._recomputed_flops += recomputed(func, args, flops)
        if func.is_view:
            self._views.add(name)
        self._on_device = self._on_device or any(t.device.type != "cpu" for t in tensors)
        moved = 0 if func.is_view else _moved_bytes(name, tensors, results)
        shape = " ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors[:3])
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        row = self._rows.setdefault((name, shape, dtype), [0, 0, 0, 0.0, float(flops is not None)])
        row[0] += 1
        row[1] += flops or 0
        row[2] += moved
        row[3] += took_s
        place = _read_back(name, tensors, results)
        if place is not None:
            self._places[place] += 1

    def census(self) -> Census:
        """What was counted."""
        operations = [
            Operation(
                name=name,
                shape=shape,
                dtype=dtype,
                num_calls=int(row[0]),
                flops=int(row[1]),
                moved_bytes=int(row[2]),
                self_s=row[3],
                counted=bool(row[4]),
            )
            for (name, shape, dtype), row in self._rows.items()
        ]
        total = sum(map(self._weight, operations))
        uncounted: Counter[str] = Counter()
        for op in operations:
            if not op.counted and op.name not in self._views:
                uncounted[op.name] += int(1e9 * self._weight(op))
        heavy = [name for name, weight in uncounted.most_common() if weight / 1e9 > UNCOUNTED_SHARE * total]
        return Census(
            num_operations=sum(op.num_calls for op in operations),
            num_syncs=sum(self._places.values()),
            flops=sum(op.flops for op in operations) - self._recomputed_flops,
            recomputed_flops=self._recomputed_flops,
            convolution_flops=sum(op.flops for op in operations if "convolution" in op.name),
            moved_bytes=sum(op.moved_bytes for op in operations),
            operations=tuple(sorted(operations, key=self._weight, reverse=True)[:MOST_OPERATIONS]),
            uncounted=tuple(heavy),
            sync_places=tuple(
                f"{place}, {'once' if num == 1 else f'{num} times'} a step"
                for place, num in self._places.most_common(10)
            ),
        )

    def _weight(self, operation: Operation) -> float:
        """Seconds; on a device the bytes that it could have moved meanwhile."""
        if self._on_device:
            return max(operation.flops / DEVICE_RIDGE, float(operation.moved_bytes))
        return operation.self_s


def _moved_bytes(name: str, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    """Bytes that an operation reads and writes, each argument and result once; wherever they come from."""
    if name in ALLOCATING:
        return 0
    read = [_stored_bytes(t) for number, t in enumerate(tensors) if number != UNREAD.get(name)]
    written = sum(map(_stored_bytes, results))
    if name in LOOKED_UP and read:
        read[0] = min(read[0], written)
    return sum(read) + written


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Of its elements, those that lie in memory one by one: a tensor that was expanded repeats them."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _read_back(name: str, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> str | None:
    """Where the script waits for a value, or None where this operation waits for nothing."""
    on_device = any(t.device.type != "cpu" for t in tensors)
    to_host = name in ("_to_copy", "copy_") and on_device and all(t.device.type == "cpu" for t in results)
    if not to_host and name not in READS[: len(READS) if on_device else 1]:
        return None
    found = script_frame(sys._getframe(2), on_device=on_device)
    return None if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"
