"""How are calls that several threads make at one time computed as one batch?

Nobody waits for a timer: a call that finds the model idle is computed at once, and those that come meanwhile wait for
its end and go together, in the thread of one of them. Rows that belong to one call come back to it in memory of their
own. Calls go together that have the same structure, types and shapes but for the number of rows; whether rows answer
for themselves is seen by computing some batches call by call as well. In: calls of threads. Out: their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from flatout.frameworks.pytorch.seams.exported import BATCHES_APART, PLAIN, leaf_kind, relative_difference
from flatout.frameworks.pytorch.seams.gate import LONGEST_WAIT_S

MOST_ROWS = 64
"""Rows of a batch; one call may have more by itself."""

COMPARED, COMPARED_EVERY = 16, 64
"""The first batches are computed call by call as well, and one in so many after them."""

MOST_RAISED = 3
"""So many first batches may raise; then inputs have no rows that could be put together."""

Compute = Callable[..., Any]


class NotTogether(RuntimeError):
    """Calls of this model cannot be put together, as computing some so has shown."""


class _Waiting:
    """A call, until its outputs are there, or its thread is to compute: a batch (`leads`), or itself alone."""

    def __init__(self, leaves: list[Any], spec: TreeSpec, key: Any, num_rows: int) -> None:
        self.leaves, self.spec, self.key, self.num_rows = leaves, spec, key, num_rows
        self.turn = Event()
        self.leads = self.done = False
        self.out: Any = None


class GatheredCalls:
    """Computes the calls of one model."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[_Waiting] = []
        self._is_busy = False
        self._num_raised = 0
        self.num_calls = self.num_batches = self.num_compared = 0
        self.apart = 0.0
        """Largest relative difference between a call's rows in a batch and the call by itself."""
        self.refused = ""
        """Why nothing is put together, as the model has shown."""

    def call(self, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of one call; `compute` gives those of any."""
        one = None if self.refused else _waiting(args, kwargs)
        if one is None:
            return compute(*args, **kwargs)
        with self._lock:
            one.leads = not self._is_busy
            self._is_busy = True
            if not one.leads:
                self._waiting.append(one)
        try:
            if not one.leads:
                one.turn.wait(LONGEST_WAIT_S)  # else it goes by itself: the one before it may wait for this one
            if one.leads:
                self._lead(one, compute)
        finally:
            self._pass_on(one)
        return one.out if one.done else compute(*args, **kwargs)

    def _lead(self, one: _Waiting, compute: Compute) -> None:
        batch = [one, *([] if self.refused else self._taken(one))]
        try:
            if len(batch) == 1:
                args, kwargs = tree_unflatten(one.leaves, one.spec)
                one.out, one.done = compute(*args, **kwargs), True
                return
            outs = _together(batch, compute)
            self.num_batches += 1
            self.num_calls += len(batch)
            if self.num_batches <= COMPARED or self.num_batches % COMPARED_EVERY == 0:
                self._compare(batch, outs, compute)
            for each, out in zip(batch, outs, strict=True):
                each.out, each.done = out, True
        except NotTogether as problem:
            self.refused = str(problem)
            raise
        except Exception as problem:
            if len(batch) == 1:
                raise  # else each makes its call by itself, and the one whose call raises is told
            self._num_raised += 1
            if not self.num_batches and self._num_raised == MOST_RAISED:
                self.refused = f"each batch raises {type(problem).__name__}"
        finally:
            for each in batch[1:]:
                each.turn.set()

    def _taken(self, one: _Waiting) -> list[_Waiting]:
        """Those that go with this one."""
        found, num_rows = [], one.num_rows
        with self._lock:
            for each in self._waiting[:]:
                if each.key == one.key and num_rows + each.num_rows <= MOST_ROWS:
                    self._waiting.remove(each)
                    found.append(each)
                    num_rows += each.num_rows
        return found

    def _pass_on(self, one: _Waiting) -> None:
        """Whoever led lets the next one lead; one that was interrupted waits no longer."""
        with self._lock:
            if one in self._waiting:
                self._waiting.remove(one)
            if not one.leads:
                return
            self._is_busy = bool(self._waiting)
            if self._waiting:
                following = self._waiting.pop(0)
                following.leads = True
                following.turn.set()

    def _compare(self, batch: Sequence[_Waiting], outs: Sequence[Any], compute: Compute) -> None:
        """Hold the rows of each call against the call by itself.

        Raises:
            NotTogether: They differ by more than rounding.
        """
        self.num_compared += 1
        for one, out in zip(batch, outs, strict=True):
            args, kwargs = tree_unflatten(one.leaves, one.spec)
            for found, true in zip(tree_flatten(out)[0], tree_flatten(compute(*args, **kwargs))[0], strict=True):
                if not isinstance(true, torch.Tensor):
                    apart = float(found != true)
                elif found.shape != true.shape or found.dtype != true.dtype:
                    apart = float("inf")
                else:
                    apart = relative_difference(found, true)
                if not apart <= BATCHES_APART:
                    raise NotTogether(
                        f"rows of a batch depend on each other: they differ by {apart:.1e} from single calls"
                    )
                self.apart = max(self.apart, apart)


def _waiting(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Waiting | None:
    """A call that can go with others; None where it has no rows, or something that cannot be told from others."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(numbers) != 1 or not min(numbers) or any(tensor.requires_grad for tensor in tensors):
        return None
    try:
        kinds = [leaf_kind(leaf, of_a_row=True) for leaf in leaves]
    except TypeError:
        return None
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(tensors[0].device.type),
    )
    return _Waiting(leaves, spec, (spec, modes, kinds), numbers.pop())


def _together(batch: Sequence[_Waiting], compute: Compute) -> list[Any]:
    """The outputs of each of these calls, computed as one.

    Raises:
        NotTogether: The outputs have no rows.
    """
    leaves = [
        torch.cat([one.leaves[n] for one in batch]) if isinstance(leaf, torch.Tensor) else leaf
        for n, leaf in enumerate(batch[0].leaves)
    ]
    args, kwargs = tree_unflatten(leaves, batch[0].spec)
    out, spec = tree_flatten(compute(*args, **kwargs))
    num_rows = sum(one.num_rows for one in batch)
    if any(not leaf.dim() or leaf.shape[0] != num_rows for leaf in out if isinstance(leaf, torch.Tensor)):
        raise NotTogether("an output has other rows than the inputs")
    if strange := [type(leaf).__name__ for leaf in out if not isinstance(leaf, (torch.Tensor, *PLAIN))]:
        raise NotTogether(f"the model returns {strange[0]}")
    found, first = [], 0
    for one in batch:
        rows = slice(first, first := first + one.num_rows)
        found.append(tree_unflatten([_own(leaf, rows) for leaf in out], spec))
    return found


def _own(leaf: Any, rows: slice) -> Any:
    """Some rows in memory of their own."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    own = leaf[rows].detach().clone()
    return own.requires_grad_() if leaf.requires_grad else own
