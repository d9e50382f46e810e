"""How is `tensor.to(device)` noticed, at no cost to any other operation? Two methods of `torch.Tensor` are replaced.

A replacement equals what it replaces wherever libraries look methods up in tables of their own (`__torch_function__`).
In: who wants to know. Out: the tensor that he gives, else PyTorch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

import torch

from flatout.frameworks.pytorch.seams.patches import Patch

Target: TypeAlias = tuple[torch.device, bool]
"""Where to, and whether the host goes on meanwhile."""

Parse: TypeAlias = Callable[[torch.dtype, tuple[Any, ...], dict[str, Any]], Target | None]


class Seam:
    """What stands in a method's place.

    It says that it is of the same kind and is equal to it: the compiler makes a list of such methods at its first use,
    and finds the one behind ours there as well.
    """

    def __init__(self, original: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._function = function

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._original)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self._function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method of the class."""
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self is other or other == self._original

    def __hash__(self) -> int:
        return hash(self._original)

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # while being copied
            raise AttributeError(name)
        return getattr(self._original, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name, as PyTorch's own."""
        return getattr, (torch.Tensor, self._original.__name__)


def parsed_to(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target | None:
    """Where `to` is asked to bring a tensor of a type; None for anything beyond that.

    >>> parsed_to(torch.half, ("cuda:1",), {"non_blocking": True}), parsed_to(torch.half, ("cuda", torch.half), {})
    ((device(type='cuda', index=1), True), (device(type='cuda'), False))
    >>> parsed_to(torch.half, (torch.half,), {}), parsed_to(torch.half, ("cuda",), {"copy": True})
    (None, None)
    >>> parsed_to(torch.half, ("cuda", torch.float32), {})
    """
    if "copy" in kwargs:
        return None
    try:
        device, wanted, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    except (RuntimeError, TypeError):  # PyTorch's own has the error that belongs here
        return None
    if device is None or wanted not in (None, dtype) or memory_format is not None:
        return None
    return device, bool(non_blocking)


def parsed_cuda(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target | None:
    """The same for `cuda`.

    >>> parsed_cuda(torch.half, (1,), {}), parsed_cuda(torch.half, (), {"non_blocking": True})
    ((device(type='cuda', index=1), False), (device(type='cuda'), True))
    """
    kwargs = dict(kwargs)
    device, *others = args or (kwargs.pop("device", None),)
    if device is None or type(device) is int:
        device = torch.device("cuda") if device is None else torch.device("cuda", device)
    non_blocking = others or [kwargs.pop("non_blocking", False)]
    return None if kwargs or len(non_blocking) > 1 else parsed_to(dtype, (device,), {"non_blocking": non_blocking[0]})


class Seams:
    """Both methods, while somebody wants to know."""

    def __init__(
        self, arrive: Callable[[torch.Tensor, Target, Callable[[], Any]], Any], leaves: Callable[[], None]
    ) -> None:
        self._arrive, self._leaves = arrive, leaves
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Replace the methods."""
        if not self._patches:
            self._patches = [
                Patch(torch.Tensor, "to", functools.partial(self._noticed, parsed_to)),
                Patch(torch.Tensor, "cuda", functools.partial(self._noticed, parsed_cuda)),
            ]

    def remove(self) -> None:
        """Give the class its own back."""
        for patch in self._patches:
            patch.remove()
        self._patches = []

    def _noticed(self, parse: Parse, original: Any, patch: Patch) -> Seam:
        arrive, leaves = self._arrive, self._leaves

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not patch.active or type(self) is not torch.Tensor:
                return original(self, *args, **kwargs)
            goes_on = bool(kwargs.get("non_blocking")) or any(one is True for one in args)
            if not self.is_cpu and not goes_on:
                return original(self, *args, **kwargs)
            target = parse(self.dtype, args, kwargs)
            is_here = target is None or target[0].type == "cpu"
            if not self.is_cpu and is_here:
                leaves()
            if target is None or is_here or not self.is_cpu:
                return original(self, *args, **kwargs)
            found = arrive(self, target, lambda: original(self, *args, **kwargs))
            return original(self, *args, **kwargs) if found is None else found

        return Seam(original, method)
