"""What do the stages of a pipeline send each other?

Any value with tensors in it, as one message with a head that tells their shapes, so that nobody need know them before;
and whether what they were computed from came at all. In: a value. Out: the same on another rank, or on all.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group, packed, padded, unpacked
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

HEAD_BYTES = 1 << 14
"""Of a head: room for some hundreds of tensors."""


@dataclass(slots=True)
class Parcel:
    """What is sent at once; `is_whole`: whether it is what was to be sent, or something before it has failed."""

    value: Any
    is_whole: bool = True

    def head(self) -> torch.Tensor:
        """What the other side must know first: the value with tensors of the same shape and no memory."""
        devices = [tensor.device.type for tensor in tensors_of(self.value)]
        try:
            form = map_tensors(lambda one: one.detach().to("meta").requires_grad_(one.requires_grad), self.value)
            text = pickle.dumps((self.is_whole, form, devices))
        except Exception as problem:
            raise NotDivided(
                "a model cannot be divided into stages",
                cause=f"what it returns cannot be told to other ranks: {type(problem).__name__}: {problem}",
            ) from problem
        if len(text) > HEAD_BYTES:
            raise NotDivided(
                "a model cannot be divided into stages",
                cause=f"the form of what it returns, {len(devices)} tensors and what else, takes {len(text):,} bytes, "
                f"and {HEAD_BYTES:,} are passed",
            )
        return torch.frombuffer(bytearray(text.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)

    def body(self, device: torch.device) -> torch.Tensor:
        """All numbers, as bytes."""
        return packed(tensors_of(self.value), device)

    @classmethod
    def arriving(cls, head: torch.Tensor, device: torch.device, fill: Callable[[torch.Tensor], object]) -> Parcel:
        """The parcel whose head is here, with tensors in memory of their own; `fill` receives its body."""
        is_whole, form, devices = pickle.loads(bytes(head.numpy()))  # which end before the zeros behind them
        kinds = [(one.shape, one.dtype) for one in tensors_of(form)]
        size = sum(padded(math.prod(shape) * dtype.itemsize) for shape, dtype in kinds)
        body = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            fill(body)
        arrived = zip(unpacked(body, kinds), devices, strict=True)

        def filled(one: torch.Tensor) -> torch.Tensor:
            mine, place = next(arrived)
            return mine.to("cpu" if place == "cpu" else device, copy=True).requires_grad_(one.requires_grad)

        return cls(map_tensors(filled, form), is_whole)


class Line:
    """All ranks, one after the other; what is sent lies on a device."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, parcel: Parcel, to: int) -> None:
        """Send, and go on; see `settle`."""
        head, body = parcel.head(), parcel.body(self._device)
        self._group.serve(self._device)
        for one in (head, body) if body.numel() else (head,):
            self._sent.append((self._group.processes.send([one], to, 0), one))

    def receive(self, source: int, name: str) -> Parcel:
        """Wait for what a rank sends."""
        group = self._group
        group.serve(self._device)
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)

        def fill(body: torch.Tensor) -> None:
            group.processes.recv([body], source, 0).wait()
            group.keep(head, body)

        with group.named(name):
            group.processes.recv([head], source, 0).wait()
            group.keep(head)
            return Parcel.arriving(head, self._device, fill)

    def settle(self, name: str) -> None:
        """All that was sent has gone."""
        sent, self._sent = self._sent, []
        with self._group.named(name):
            for work, _ in sent:
                work.wait()
        if sent:
            self._group.keep(*(one for _, one in sent[-2:]))

    def told(self, parcel: Parcel | None, source: int, name: str) -> Parcel:
        """A parcel of one rank, on all."""
        group = self._group
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8) if parcel is None else parcel.head()
        group.broadcast(head, name, source=source)
        if parcel is None:
            return Parcel.arriving(head, self._device, lambda body: group.broadcast(body, name, source=source))
        body = parcel.body(self._device)
        if body.numel():
            group.broadcast(body, name, source=source)
        return parcel
