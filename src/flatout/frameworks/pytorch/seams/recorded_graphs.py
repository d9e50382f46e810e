"""What does a script see of a model that is computed by recorded CUDA graphs? The same as of plain.

A recorded graph writes its results to the same places each time: outputs that a script keeps for longer than a step,
and gradients that it accumulates or sets to zero in place, would be overwritten by the next replay. So outputs are
copied as they leave the graphs, and gradients that are still there when the next call begins. In: a compiled call,
parameters. Out: the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

Compute = Callable[..., Any]


def with_own_results(compute: Compute, plain: Compute, present: Callable[[], OwnGradients | None]) -> Compute:
    """The call with results that are the script's to keep; inputs and parameters that it returns stay what they are.

    Where the script keeps gradients of the last step in a way that they cannot be moved, this one is computed plainly.

    Args:
        compute: Runs recorded graphs.
        plain: Computes the same without them.
        present: The gradients that the graphs may overwrite, while they are in use.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        gradients = present()
        if gradients is not None and not gradients.are_free():
            return plain(*args, **kwargs)
        given = {id(tensor) for tensor in tensors_of((args, kwargs))}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            is_scripts = id(tensor) in given or (tensor.is_leaf and tensor.requires_grad)
            return tensor if is_scripts else tensor.clone()

        return map_tensors(own, compute(*args, **kwargs))

    return call


class OwnGradients:
    """Gradients that outlive their step are copied, all at once, before graphs are replayed; until `remove`.

    Most scripts set theirs to None by then, and nothing is copied. Which gradients are a graph's is noted on the nodes
    that accumulate, which are kept alive for it: where the first one arrives, it becomes the parameter's as it is.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._kept: list[tuple[Any, Any]] = []
        self._arrived: dict[int, int] = {}
        """Where the gradient lay that came last for the parameter of a number."""
        self._memory: list[Any] = []
        """What gradients of former steps lay in, not kept alive."""
        with torch.enable_grad():
            for number, parameter in enumerate(self._parameters):
                node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                self._kept.append((node, node.register_prehook(partial(self._note, number))))

    def remove(self) -> None:
        """Note nothing any more."""
        for _, handle in self._kept:
            handle.remove()
        self._kept = []

    def _note(self, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.layout is torch.strided:
                self._arrived[number] = gradient.data_ptr()

    def _of_graphs(self) -> list[torch.Tensor]:
        """Gradients that lie where they have come from."""
        found = [(self._parameters[n].grad, place) for n, place in self._arrived.items()]
        return [g for g, place in found if g is not None and g.layout is torch.strided and g.data_ptr() == place]

    def end_step(self) -> None:
        """A step has ended: what its gradients lie in is written to from the next call on."""
        from torch.multiprocessing.reductions import StorageWeakRef

        self._memory += [StorageWeakRef(gradient.untyped_storage()) for gradient in self._of_graphs()]

    def are_free(self) -> bool:
        """Copy gradients that are still there; whether nobody else holds what gradients of former steps lay in."""
        found = self._of_graphs()
        if found:
            for gradient, own in zip(found, torch._foreach_mul([g.detach() for g in found], 1), strict=True):
                gradient.data = own  # in place: the script may hold the same tensor
        self._arrived.clear()
        self._memory = [memory for memory in self._memory if not memory.expired()]
        return not self._memory


def num_recorded() -> int:
    """Graphs that have been recorded on the present GPU."""
    try:
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        if manager is None:
            return 0
        return sum(1 + node.num_descendants() for nodes in manager.roots.values() for node in nodes)
    except (ImportError, RuntimeError, AttributeError, AssertionError):  # names that PyTorch does not promise to keep
        return 0
