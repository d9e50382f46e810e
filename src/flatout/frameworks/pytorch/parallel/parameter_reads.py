"""Which parameters are PyTorch's functions given? In: parameters. Out: told at each function that computes with one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.frameworks.pytorch.parallel.answers import OF_THE_OBJECT, SHAPES, flat


class ParameterReads(TorchFunctionMode):
    """Within, it is told what is computed with.

    Args:
        parameters: Identities of those that count.
        read: Told the identity of one that a function was given.
    """

    def __init__(self, parameters: Collection[int], read: Callable[[int], None]) -> None:
        super().__init__()
        self._parameters, self._read = parameters, read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tell of parameters, and compute."""
        if func not in OF_THE_OBJECT and func not in SHAPES:
            for one in flat((args, kwargs or {})):
                if isinstance(one, nn.Parameter) and id(one) in self._parameters:
                    self._read(id(one))
        return func(*args, **(kwargs or {}))
