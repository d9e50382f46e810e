"""Which modules are called within one call of a model? In: nothing. Out: their identities."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Called:
    """Notes modules that are called while it is entered."""

    def __init__(self) -> None:
        self.modules: set[int] = set()
        self._handle: Any = None

    def __enter__(self) -> Called:
        self._handle = register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, module: nn.Module, _: Any) -> None:
        self.modules.add(id(module))
