"""What does a module remember between two calls, beside its parameters? Buffers and plain attributes.

A replayed call must begin where the script's own began and leave nothing behind: batch statistics, a hidden state that
the module keeps on itself, a counter, a list that it appends to. In: a module. Out: its state, kept and put back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

MAX_ATTRIBUTE_BYTES = 64 * 2**20
"""Tensors kept as plain attributes are copied up to this size in all; larger ones are most often constants."""

INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}


class ModuleState:
    """Buffers and attributes of a module and everything below it, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._left_bytes = MAX_ATTRIBUTE_BYTES
        seen: set[int] = set()
        for part in module.modules():
            for buffer in part.buffers(recurse=False):
                self._keep_value(buffer, seen)
            if not isinstance(part, torch.jit.ScriptModule):
                self._keep_attributes(vars(part), seen)

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes."""
        return sum(value.numel() * value.element_size() for value in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Buffers, and attributes that are tensors, as they were."""
        return [value for _, value in self._values]

    def _keep_value(self, tensor: torch.Tensor, seen: set[int]) -> None:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            self._values.append((tensor, tensor.detach().clone()))

    def _keep_attributes(self, attributes: dict[str, Any], seen: set[int]) -> None:
        own = {name: value for name, value in attributes.items() if name not in INTERNAL}
        self._attributes.append((attributes, own))
        buffers = attributes.get("_buffers")
        if isinstance(buffers, dict):  # a module may put another tensor in a buffer's place
            self._contents.append((buffers, dict(buffers)))
        for value in own.values():
            if type(value) in (list, dict, set, deque):
                self._contents.append((value, value.copy()))
            elif isinstance(value, torch.Tensor) and not value.requires_grad:
                size = value.numel() * value.element_size()
                if size <= self._left_bytes and value.layout is torch.strided:
                    self._left_bytes -= size
                    self._keep_value(value, seen)

    def restore(self) -> None:
        """Put everything back, values into the tensors that held them."""
        for attributes, own in self._attributes:
            for name in [n for n in attributes if n not in INTERNAL and n not in own]:
                del attributes[name]
            attributes.update({name: value for name, value in own.items() if attributes.get(name) is not value})
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            elif isinstance(container, deque):
                container.clear()
                container.extend(content)
            else:
                container.clear()
                container.update(content)
        for tensor, value in self._values:
            # .data: a graph that is still to be differentiated must not take this for a change of the tensor
            tensor.data.copy_(value)
