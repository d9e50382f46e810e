"""What do the stages of a pipeline send each other?

Tensors, as one message with a head that tells their shapes, so that nobody need know them before; and whether what they
were computed from came at all. In: tensors. Out: the same ones on another rank, or on all.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.group import Group, packed, padded, unpacked
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

HEAD_BYTES = 1 << 14
"""Of a head: room for some two hundred tensors."""


@dataclass(slots=True)
class Parcel:
    """What is sent at once.

    Attributes:
        tensors: Any number; None for a gradient that there is none of.
        wanted: Which of them gradients are wanted of.
        is_whole: Whether it is what was to be sent; false where something before it has failed.
    """

    tensors: Sequence[torch.Tensor | None]
    wanted: Sequence[bool]
    is_whole: bool = True

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None]) -> Parcel:
        """Of tensors, with what they want."""
        return cls(tensors, [t is not None and t.requires_grad for t in tensors])

    def head(self) -> torch.Tensor:
        """What the other side must know first."""
        kinds = [
            None if tensor is None else (tensor.shape, tensor.dtype, is_wanted, tensor.device.type != "cpu")
            for tensor, is_wanted in zip(self.tensors, self.wanted, strict=True)
        ]
        text = pickle.dumps((self.is_whole, kinds))
        if len(text) > HEAD_BYTES:
            raise NotDivided("a model cannot be divided into stages", cause=f"{len(kinds)} tensors are passed at once")
        return torch.frombuffer(bytearray(text.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)

    def body(self, device: torch.device) -> torch.Tensor:
        """All numbers, as bytes."""
        return packed([t for t in self.tensors if t is not None], device)

    @classmethod
    def arriving(cls, head: torch.Tensor, device: torch.device, fill: Callable[[torch.Tensor], object]) -> Parcel:
        """The parcel whose head is here, with tensors in memory of their own; `fill` receives its body."""
        is_whole, kinds = pickle.loads(bytes(head.numpy()))  # which end before the zeros behind them
        sent = [(shape, dtype) for shape, dtype, *_ in filter(None, kinds)]
        body = torch.empty(sum(padded(math.prod(s) * d.itemsize) for s, d in sent), dtype=torch.uint8, device=device)
        if body.numel():
            fill(body)
        arrived = iter(unpacked(body, sent))
        own = [None if kind is None else next(arrived).clone() for kind in kinds]
        tensors = [one.cpu() if one is not None and not kind[3] else one for one, kind in zip(own, kinds, strict=True)]
        return cls(tensors, [kind is not None and kind[2] for kind in kinds], is_whole)


class Line:
    """All ranks, one after the other.

    Args:
        group: They.
        device: Where what is sent lies.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, parcel: Parcel, to: int) -> None:
        """Send, and go on; see `settle`."""
        body = parcel.body(self._device)
        self._group.serve(self._device)
        for one in (parcel.head(), body) if body.numel() else (parcel.head(),):
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


def with_form(value: Any) -> list[torch.Tensor]:
    """What a value looks like beside its tensors, as bytes, and the tensors."""
    stream, tensors = io.BytesIO(), list[torch.Tensor]()
    _Pickler(stream, tensors).dump(value)
    return [torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8), *tensors]


def formed(sent: Sequence[Any]) -> Any:
    """The value again."""
    form, *tensors = sent
    return _Unpickler(io.BytesIO(bytes(form.numpy())), tensors).load()


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and numbers them."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The number of a tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self._tensors)
            self._tensors.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts tensors in."""

    def __init__(self, stream: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Any:
        """The tensor of a number."""
        return self._tensors[number]
