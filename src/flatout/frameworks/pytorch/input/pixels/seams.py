"""Which functions are others while a dataset's code runs, so that its pixel work is noted and not done?

`PIL.Image.open`, torchvision's functions that make tensors of images, those of its functions on images whose result has
a known size and mode, and `torch.from_numpy(numpy.array(image))` in the script's own functions. Only while a batch is
fetched, and only for the thread that fetches it. A function that is not the library's own any more stays as it is. In:
modules that the script has loaded. Out: pixel work.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from flatout.frameworks.pytorch.input.pixels import replacements
from flatout.frameworks.pytorch.input.pixels.elements import CHANNELS
from flatout.frameworks.pytorch.input.pixels.files import Unloaded, picture_of
from flatout.frameworks.pytorch.input.pixels.images import Deferred
from flatout.frameworks.pytorch.input.pixels.replacements import DeferredArray, Replacement
from flatout.frameworks.pytorch.input.pixels.work import Work
from flatout.frameworks.pytorch.seams.patches import Patch

_OLD, _OLD_PIL = "torchvision.transforms.functional", "torchvision.transforms._functional_pil"
_NEW = "torchvision.transforms.v2.functional"

_PLACES: tuple[tuple[str, str, str, Replacement], ...] = (
    ("PIL.Image", "open", "PIL.Image", replacements.noting_open),
    (_OLD, "to_tensor", _OLD, replacements.noting_to_tensor),
    (_OLD, "pil_to_tensor", _OLD, replacements.noting_pil_to_tensor),
    (_NEW, "pil_to_tensor", _OLD, replacements.noting_pil_to_tensor),
    (f"{_NEW}._type_conversion", "pil_to_tensor", _OLD, replacements.noting_pil_to_tensor),
    (_OLD, "normalize", _OLD, replacements.noting_normalize),
    (_OLD_PIL, "pad", _OLD_PIL, replacements.noting_pad),
    (_OLD_PIL, "to_grayscale", _OLD_PIL, replacements.noting_to_grayscale),
    *((_OLD_PIL, name, _OLD_PIL, replacements.noting_same_size) for name in replacements.SAME_SIZE),
    ("torch", "from_numpy", "torch", replacements.noting_from_numpy),
)
"""What is replaced: where, under which name, the module that it belongs to, and by what."""


class Seams:
    """The places where a dataset's code is told from outside to put pixel work off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_active = 0
        self._patches: list[Patch] = []
        self._made: dict[tuple[str, str], tuple[Any, Any]] = {}
        """What was replaced before, and by what."""
        self._kernels: list[tuple[dict[type, Any], Any, Any]] = []
        """Tables of torchvision's in which images of ours have an entry meanwhile: that of PIL's images, and ours."""
        self._here = threading.local()

    @property
    def work(self) -> Work | None:
        """Whose pixel work is noted in this thread at present."""
        return getattr(self._here, "work", None)

    @contextlib.contextmanager
    def open(self, straight: frozenset[CodeType]) -> Iterator[Callable[[Work | None], None]]:
        """Functions are replaced meanwhile; call what is given with the work of each item before its code runs.

        `straight`: see `Harmless`.
        """
        before: tuple[Any, Any] = self.work, getattr(self._here, "straight", frozenset())
        self._here.straight = straight
        self._enter()
        try:
            yield functools.partial(setattr, self._here, "work")
        finally:
            self._here.work, self._here.straight = before
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._num_active += 1
            if self._num_active == 1:
                for module_name, name, home, make in (*_PLACES, ("numpy", "array", "numpy", self._array)):
                    module = sys.modules.get(module_name)
                    if module is not None:
                        self._replace(module, name, home, make)
                self._kernels = self._kernels or list(_kernels())
                for kernels, kernel, ours in self._kernels:
                    if kernels.get(sys.modules["PIL.Image"].Image) is kernel:
                        kernels[Deferred] = kernels[Unloaded] = ours

    def _leave(self) -> None:
        with self._lock:
            self._num_active -= 1
            if self._num_active == 0:
                patches, self._patches = self._patches, []
                for patch in reversed(patches):
                    patch.remove()
                for kernels, _, _ in self._kernels:
                    for kind in (Deferred, Unloaded):
                        kernels.pop(kind, None)

    def _replace(self, module: ModuleType, name: str, home: str, make: Replacement) -> None:
        """One function, where it is still the library's own."""
        place, original = (module.__name__, name), vars(module).get(name)
        original_then, ours = self._made.get(place, (None, None))
        if original is not original_then or ours is None:
            if not belongs_to(original, name, home):
                return
            ours = self._only_here(original, make)
            self._made[place] = original, ours
        self._patches.append(Patch(module, name, lambda original, patch: ours))

    def _only_here(self, original: Any, make: Replacement) -> Callable[..., Any]:
        """The replacement, for threads that note pixel work; the original for others."""
        ours = make(original)

        @functools.wraps(original)
        def replaced(*operands: Any, **keywords: Any) -> Any:
            work = self.work
            return original(*operands, **keywords) if work is None else ours(work, *operands, **keywords)

        return replaced

    def _array(self, original: Any) -> Callable[..., Any]:
        def array(work: Work, *operands: Any, **keywords: Any) -> Any:
            if len(operands) == 1 and not keywords and sys._getframe(2).f_code in self._here.straight:
                picture = picture_of(operands[0])
                if picture is not None and picture.mode in CHANNELS:
                    return DeferredArray(picture)
            return original(*operands, **keywords)

        return array


def belongs_to(function: Any, name: str, module_name: str) -> bool:
    """Whether a function is the one of this name that a module came with."""
    if type(function) is BuiltinFunctionType:
        return (function.__module__ or module_name) == module_name and function.__name__ == name
    if type(function) is not FunctionType or function.__module__ != module_name or function.__qualname__ != name:
        return False
    return function.__code__.co_filename == getattr(sys.modules.get(module_name), "__file__", None)


def _kernels() -> Iterator[tuple[dict[type, Any], Any, Any]]:
    """What torchvision's newer functions call for an image of PIL's, where that is one of the older ones itself.

    Each with the table that it stands in, and with what is called for images of ours.
    """
    registry = getattr(sys.modules.get(f"{_NEW}._utils"), "_KERNEL_REGISTRY", {})
    for kernels in registry.values():
        kernel = kernels.get(sys.modules["PIL.Image"].Image)
        name = getattr(kernel, "__name__", "")
        if (name in replacements.SAME_SIZE or name == "pad") and belongs_to(kernel, name, _OLD_PIL):
            make = replacements.noting_pad if name == "pad" else replacements.noting_same_size
            yield kernels, kernel, functools.partial(make(kernel), None)
