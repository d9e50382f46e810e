"""Can calls of which no gradients are taken be computed in stages, and are they what one process computes?

Nothing of them is compared later, as gradients are. So of each kind the first call, and ever rarer later ones, are
computed by every rank with gathered parameters as well. In: calls of one kind. Out: what one process gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.changes import Changes
from flatout.frameworks.pytorch.parallel.pattern import is_rare
from flatout.frameworks.pytorch.parallel.remembered import forgotten, remembered
from flatout.frameworks.pytorch.parallel.script_hooks import has_inner_hooks
from flatout.frameworks.pytorch.parallel.skeleton import skeleton
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import tensors_of

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.pipeline_parts import PipelineParts


class Evaluation:
    """Calls of one kind."""

    def __init__(self, held: PipelineParts) -> None:
        self._held = held
        self._num_calls = 0
        self._changes = Changes()
        self._in_stages = True

    def computed(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute one of them."""
        self._num_calls += 1
        is_due = self._changes.look() or is_rare(self._num_calls, self._held.group.world)
        try:
            return self._value(compute, args, kwargs, is_due=is_due)
        finally:
            self._changes.note(self._held.module)

    def _value(self, compute: Callable[..., Any], args: Any, kwargs: Any, *, is_due: bool) -> Any:
        if not self._in_stages or has_inner_hooks(self._held.module):
            return self._whole(compute, args, kwargs)
        if is_due:
            return self._both_ways(compute, args, kwargs)
        made = self._held.in_stages(compute, args, kwargs)
        return self._whole(compute, args, kwargs) if made is None else made.value

    def _whole(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._held.tell_of_whole()
        with self._held.in_whole():
            return compute(*args, **kwargs)

    def _both_ways(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute it in stages, and then as one process does, which is what counts; hear what stages lack."""
        held, module = self._held, self._held.module
        kept, begun = ModuleState(module), RandomStates()
        made = held.in_stages(compute, args, kwargs)
        then = remembered(module)
        kept.restore()
        begun.restore()
        with held.in_whole():
            wanted = compute(*args, **kwargs)
        same = made is not None and skeleton(made.value) == skeleton(wanted) and forgotten(then, module) is None
        if same and made is not None:
            pairs = list(zip(made.outputs, tensors_of(wanted), strict=False))
            same = len(made.outputs) == len(tensors_of(wanted)) and all(assembly.is_close(*pair) for pair in pairs)
        same = same and begun.equals(RandomStates())  # else each rank would draw other numbers from now on
        self._in_stages = held.group.everywhere(bool(same), "agreement on an evaluation")
        if not self._in_stages:
            held.tell_of_whole()
        return wanted
