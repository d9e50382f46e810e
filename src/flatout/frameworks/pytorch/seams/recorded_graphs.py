"""What does a script see of a model that is computed by recorded CUDA graphs? The same as of plain.

A recorded graph writes its results to the same places each time: outputs that a script keeps for longer than a step,
and gradients that it accumulates or sets to zero in place, would be overwritten by the next replay. So both are copied
as they leave the graphs. In: a compiled call, parameters. Out: the call, and what undoes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of


def with_own_outputs(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The call with outputs that are the script's to keep; inputs and parameters that it returns stay what they are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {id(tensor) for tensor in tensors_of((args, kwargs))}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            is_scripts = id(tensor) in given or (tensor.is_leaf and tensor.requires_grad)
            return tensor if is_scripts else tensor.clone()

        return map_tensors(own, compute(*args, **kwargs))

    return call


class OwnGradients:
    """Gradients are copied before they are accumulated into `.grad`, until `remove`.

    The hook is on the node that accumulates, which is kept alive for it: the parameter itself shows nothing.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._kept: list[tuple[Any, Any]] = []
        with torch.enable_grad():
            for parameter in parameters:
                if parameter.requires_grad and parameter.is_leaf:
                    node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                    self._kept.append((node, node.register_prehook(_copied)))

    def remove(self) -> None:
        """Gradients are accumulated as they come."""
        for _, handle in self._kept:
            handle.remove()
        self._kept = []


def _copied(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else gradient.clone() for gradient in gradients)


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
