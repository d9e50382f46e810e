"""What does the script hold while a tensor of pixels has not been computed? A tensor that knows its shape and type.

Calls that can be noted are noted. Whatever else is done with it computes it: it becomes the very tensor that PyTorch
would have given. In: numbers that are not computed. Out: tensors.
"""

from __future__ import annotations

import types
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from flatout.frameworks.pytorch.input.pixels.calls import Layout, Noted, known, normalized, noted
from flatout.frameworks.pytorch.input.pixels.elements import Elements
from flatout.frameworks.pytorch.input.pixels.memory import array_of
from flatout.frameworks.pytorch.input.pixels.work import TooLateError, Work
from flatout.guest.interruptions import let_through


class DeferredTensor(torch.Tensor):
    """A tensor that is not computed yet."""

    flatout_plain: ClassVar[type[torch.Tensor]] = torch.Tensor
    """The class that it stands for."""
    flatout_work: Work
    flatout_elements: Elements
    flatout_layout: Layout
    flatout_family: object
    """The same for tensors that are views of one another."""
    flatout_target: torch.Tensor | None
    """Where its numbers lie, as soon as there is a place for them."""
    flatout_filled: bool
    flatout_in_batch: bool
    """Whether that place is part of a batch."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if known(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], DeferredTensor):
            made = args[0].flatout_note(func, args[1:], kwargs)
            if made is not None:
                return made
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, DeferredTensor):
                leaf.flatout_compute()
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's own has no class before it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What comes here has passed by `__torch_function__`, and cannot be given the true tensor any more."""
        problem = TooLateError(f"`{func}` takes a tensor that is not computed yet")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, DeferredTensor):
                leaf.flatout_work.spoil(problem)
        raise problem

    def as_subclass(self, cls: Any) -> Any:
        """As PyTorch's, which passes by `__torch_function__`."""
        made = self.flatout_note(torch.Tensor.as_subclass, (cls,), None)
        if made is not None:
            return made
        self.flatout_compute()
        return self.as_subclass(cls)

    def flatout_note(self, call: Any, operands: tuple[Any, ...], keywords: Any) -> DeferredTensor | None:
        """The result of a call, where it can be noted."""
        own = self.__dict__
        if not own["flatout_work"].here():
            return None
        try:
            found = noted(call, own["flatout_elements"], own["flatout_layout"], operands, keywords)
        except Exception as problem:  # noqa: BLE001  PyTorch raises what belongs to be raised
            let_through(problem)
            return None
        return None if found is None else self.flatout_then(found)

    def flatout_normalize(self, mean: Any, std: Any, *, in_place: bool) -> DeferredTensor | None:
        """The result of torchvision's `normalize`, where it can be noted."""
        own = self.__dict__
        if type(mean) not in (tuple, list) or type(std) not in (tuple, list):
            return None
        try:
            found = normalized(
                own["flatout_elements"], own["flatout_layout"], tuple(mean), tuple(std), in_place=in_place
            )
        except Exception as problem:  # noqa: BLE001  torchvision raises what belongs to be raised
            let_through(problem)
            return None
        return None if found is None else self.flatout_then(found)

    def flatout_then(self, found: Noted) -> DeferredTensor | None:
        """The tensor for what a call on this one gives."""
        own = self.__dict__
        if found.kind != "itself":
            return deferred(found.elements, found.layout, own["flatout_family"] if found.kind == "view" else None)
        return self.flatout_changed(found.elements)

    def flatout_changed(self, elements: Elements) -> DeferredTensor | None:
        """The tensor itself with other numbers, as an operation in place leaves it; None where a view would see it."""
        own = self.__dict__
        if elements is not own["flatout_elements"]:
            if _relatives(self):
                return None
            own["flatout_elements"] = elements
        return self

    def flatout_place(self, target: torch.Tensor) -> None:
        """The numbers are to lie in this part of a batch."""
        self.__dict__.update(flatout_target=target, flatout_in_batch=True)

    def flatout_settle(self) -> None:
        """Have memory for the numbers, made by this thread and as it makes tensors."""
        own = self.__dict__
        if own["flatout_target"] is None:
            own["flatout_target"] = own["flatout_layout"].place(own["flatout_elements"].axes)

    def flatout_fill(self) -> None:
        """Compute the numbers; any thread may do so."""
        own = self.__dict__
        if own["flatout_filled"]:
            return
        self.flatout_settle()
        own["flatout_elements"].fill(array_of(own["flatout_target"]))
        own["flatout_filled"] = True

    def flatout_value(self) -> torch.Tensor:
        """A tensor with the numbers, which are computed; not to be changed."""
        value: torch.Tensor = self.__dict__["flatout_target"]
        return value

    def flatout_compute(self) -> None:
        """Become the tensor that PyTorch would have given, and with it those that share its memory.

        Raises:
            Exception: Whatever PIL raises, or PyTorch where somebody refers to it in a way that forbids it.
        """
        work: Work = self.__dict__["flatout_work"]
        try:
            with work.held():
                family = [self, *_relatives(self)]
                first = next((one for one in family if not one.__dict__["flatout_layout"].view), self)
                first.flatout_fill()
                axes = first.__dict__["flatout_elements"].axes
                first.flatout_become(first.flatout_own())
                for one in family:
                    if one is not first:
                        dims = [axes.index(axis) for axis in one.__dict__["flatout_elements"].axes]
                        one.flatout_become(first.permute(dims))
        except BaseException as problem:
            work.spoil(problem)
            raise

    def flatout_own(self) -> torch.Tensor:
        """The numbers, which are computed, in memory that is no part of a batch."""
        own = self.__dict__
        value: torch.Tensor = own["flatout_target"]
        return (
            own["flatout_layout"].place(own["flatout_elements"].axes).copy_(value) if own["flatout_in_batch"] else value
        )

    def flatout_become(self, value: torch.Tensor) -> None:
        """Be this tensor from now on."""
        kind = self.__dict__["flatout_layout"].kind
        self.__dict__.clear()
        if kind is not torch.Tensor:
            value = value.as_subclass(kind)
        torch.utils.swap_tensors(self, value)


def deferred(elements: Elements, layout: Layout, family: object | None = None) -> DeferredTensor:
    """The tensor that the script is given for numbers; `family`: that of a tensor of which it is a view."""
    tensor = torch.Tensor._make_wrapper_subclass(
        _class_for(layout.kind), layout.shape, strides=layout.strides, dtype=layout.dtype, device=torch.device("cpu")
    )
    work = elements.picture.work
    tensor.__dict__.update(
        flatout_work=work, flatout_elements=elements, flatout_layout=layout, flatout_target=None, flatout_filled=False,
        flatout_in_batch=False, flatout_family=object() if family is None else family,
    )  # fmt: skip
    work.tensors.append(tensor)
    return tensor


@lru_cache(maxsize=16)
def _class_for(kind: type[torch.Tensor]) -> type[DeferredTensor]:
    """The class of ours that stands for a class of tensors."""
    if kind is torch.Tensor:
        return DeferredTensor
    made = types.new_class(
        kind.__name__, (DeferredTensor, kind), exec_body=lambda names: names.update(flatout_plain=kind)
    )
    made.__module__ = kind.__module__
    return made


def _relatives(tensor: DeferredTensor) -> list[DeferredTensor]:
    """The other tensors that share its memory, that somebody has, and that are not computed either."""
    own = tensor.__dict__
    family, work = own["flatout_family"], own["flatout_work"]
    return [one for one in work.wanted() if one is not tensor and one.__dict__.get("flatout_family") is family]
