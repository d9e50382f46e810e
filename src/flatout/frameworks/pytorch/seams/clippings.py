"""How is it that gradients are clipped once for each update, where an update is made of several batches?

`clip_grad_norm_` and `clip_grad_value_` of PyTorch are noted instead of made, and made on the mean just before the
update; until then the script is told the norm of the batch at hand. What clips in another way acts on each batch. In:
which parameters are held back, and calls of the two. Out: the calls, made when they are asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from types import GeneratorType
from typing import Any

import torch
from torch.nn.utils import clip_grad, get_total_norm

from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.guest.tracebacks import hide_ours

NAMES = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """One call that was not made."""

    call: Callable[..., Any]
    parameters: list[torch.Tensor]
    settings: dict[str, Any]

    def make(self) -> None:
        """Clip what stands there now."""
        self.call(self.parameters, **self.settings)


class Clippings:
    """Calls that are noted, from `begin` to `end`."""

    def __init__(self, held_back: Callable[[], Collection[int]]) -> None:
        self._held_back = held_back
        """The `id`s of all parameters whose updates are held back at present; empty where none is."""
        self._noted: dict[tuple[str, tuple[int, ...]], Clipping] = {}
        """By function and parameters: a batch that the script then leaves out is followed by another of the same."""
        self._patches: list[Patch] = []

    def begin(self) -> None:
        """Note from here on."""
        for name in NAMES:
            for place in (torch.nn.utils, clip_grad):
                self._patches.append(Patch(place, name, self._noting(name)))

    def end(self) -> None:
        """Note no more; what was noted is made."""
        for patch in self._patches:
            patch.remove()
        self._patches = []
        self.make_all()

    def take(self, parameters: Collection[int]) -> list[Clipping]:
        """What was noted and concerns some of these parameters, by their `id`; noted no longer."""
        keys = [key for key in self._noted if not set(key[1]).isdisjoint(parameters)]
        return [self._noted.pop(key) for key in keys]

    def make_all(self) -> None:
        """Make what was noted, on the gradients that stand there."""
        for key in list(self._noted):
            self._noted.pop(key).make()

    def _noting(self, name: str) -> Callable[[Any, Patch], Any]:
        def make(original: Any, patch: Patch) -> Any:
            signature = inspect.signature(original)

            @wraps(original)
            def clip(*args: Any, **kwargs: Any) -> Any:
                try:
                    if patch.active and not torch.compiler.is_compiling() and (ours := self._held_back()):
                        try:
                            bound = signature.bind(*args, **kwargs)
                        except TypeError:  # which the original says in its own words
                            return original(*args, **kwargs)
                        present = bound.arguments["parameters"]
                        parameters = [present] if isinstance(present, torch.Tensor) else list(present)
                        if any(id(p) in ours for p in parameters):
                            return self._note(name, original, parameters, dict(bound.arguments))
                        if isinstance(present, GeneratorType):  # used up now
                            bound.arguments["parameters"] = (p for p in parameters)
                        args, kwargs = bound.args, bound.kwargs
                    return original(*args, **kwargs)
                except BaseException as problem:
                    hide_ours(problem)
                    raise

            return clip

        return make

    def _note(self, name: str, call: Any, parameters: list[torch.Tensor], settings: dict[str, Any]) -> Any:
        del settings["parameters"]
        told = None
        if name == "clip_grad_norm_":
            asked = {key: value for key, value in settings.items() if key != "max_norm"}
            told = get_total_norm([p.grad for p in parameters if p.grad is not None], **asked)
        self._noted[name, tuple(map(id, parameters))] = Clipping(call=call, parameters=parameters, settings=settings)
        return told
