"""Which operations make up one step, and what does each compute and move?

A dispatch mode sees every operation of forward, backward and optimizer. In: one step under the mode. Out: a `Census`:
FLOPs from PyTorch's own formulas (matrix products and convolutions, two per multiply-add), bytes of arguments and
results, values read back to the host with the line that asked for them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from flatout.trace import Census, Operation

MOST_OPERATIONS = 40
"""Kept one by one; all are in the totals."""

UNCOUNTED_SHARE = 0.02
"""An operation without a FLOP formula is named where it takes more than this share of the time."""

READ_BACK = "_local_scalar_dense"

_PACKAGES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


class OperationCounter(TorchDispatchMode):
    """Counts operations between `__enter__` and `__exit__`, which lie at step boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[tuple[str, str, str], list[float]] = {}
        self._uncounted: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
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
        packet = func._overloadpacket
        name = packet.__name__
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        results = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        formula = flop_registry.get(packet)
        flops = 0
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
        elif not func.is_view:
            self._uncounted[name] += int(took_s * 1e9)
        moved = 0 if func.is_view else sum(t.numel() * t.element_size() for t in (*tensors, *results))
        shape = " ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors[:3])
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        row = self._rows.setdefault((name, shape, dtype), [0, 0, 0, 0.0, float(formula is not None)])
        row[0] += 1
        row[1] += flops
        row[2] += moved
        row[3] += took_s
        if name == READ_BACK:
            self._places[_place()] += 1

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
        total_s = sum(op.self_s for op in operations)
        heavy = [name for name, ns in self._uncounted.most_common() if ns / 1e9 > UNCOUNTED_SHARE * total_s]
        return Census(
            num_operations=sum(op.num_calls for op in operations),
            num_syncs=sum(self._places.values()),
            flops=sum(op.flops for op in operations),
            moved_bytes=sum(op.moved_bytes for op in operations),
            operations=tuple(sorted(operations, key=lambda op: -op.self_s)[:MOST_OPERATIONS]),
            uncounted=tuple(heavy),
            sync_places=tuple(f"{place} ({num}x)" for place, num in self._places.most_common(10)),
        )


def _place() -> str:
    """The script's own line that asked for a value."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
