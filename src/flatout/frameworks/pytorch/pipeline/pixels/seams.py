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
from typing import Any, TypeAlias

import torch

from flatout.frameworks.pytorch.patches import Patch
from flatout.frameworks.pytorch.pipeline.pixels import geometry
from flatout.frameworks.pytorch.pipeline.pixels.calls import FLOATS, Layout
from flatout.frameworks.pytorch.pipeline.pixels.elements import CHANNELS, Arithmetic, Elements, number
from flatout.frameworks.pytorch.pipeline.pixels.files import picture_of, watch
from flatout.frameworks.pytorch.pipeline.pixels.images import deferred as deferred_image
from flatout.frameworks.pytorch.pipeline.pixels.pictures import Called, Picture
from flatout.frameworks.pytorch.pipeline.pixels.tensors import DeferredTensor
from flatout.frameworks.pytorch.pipeline.pixels.tensors import deferred as deferred_tensor
from flatout.frameworks.pytorch.pipeline.pixels.work import Work

SAME_SIZE = (
    "adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue", "adjust_gamma", "adjust_sharpness",
    "affine", "perspective", "invert", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
"""torchvision's functions on images of PIL's by which size and mode stay."""

Replacement: TypeAlias = Callable[[Any], Callable[..., Any]]


class Seams:
    """The places where a dataset's code is told from outside to put pixel work off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_active = 0
        self._patches: list[Patch] = []
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
                self._patches = [Patch(holder, name, self._only_here(make)) for holder, name, make in self._places()]

    def _leave(self) -> None:
        with self._lock:
            self._num_active -= 1
            if self._num_active == 0:
                patches, self._patches = self._patches, []
                for patch in reversed(patches):
                    patch.remove()

    def _only_here(self, make: Replacement) -> Callable[[Any, Patch], Any]:
        """The replacement, for threads that note pixel work; the original for others."""

        def made(original: Any, patch: Patch) -> Any:
            ours = make(original)

            @functools.wraps(original)
            def replaced(*operands: Any, **keywords: Any) -> Any:
                work = self.work
                if work is None or not patch.active:
                    return original(*operands, **keywords)
                return ours(work, *operands, **keywords)

            return replaced

        return made

    def _places(self) -> Iterator[tuple[Any, str, Replacement]]:
        """What is replaced, of what is loaded and the library's own."""
        for module_name, name, make in (
            *_PLACES,
            ("numpy", "array", self._array),
            ("torch", "from_numpy", _from_numpy),
        ):
            module = sys.modules.get(module_name)
            if module is not None and is_its_own(module, name):
                yield module, name, make

    def _array(self, original: Any) -> Callable[..., Any]:
        def array(work: Work, *operands: Any, **keywords: Any) -> Any:
            if len(operands) == 1 and not keywords and sys._getframe(2).f_code in self._here.straight:
                picture = picture_of(operands[0])
                if picture is not None and picture.mode in CHANNELS:
                    return DeferredArray(picture)
            return original(*operands, **keywords)

        return array


def is_its_own(module: ModuleType, name: str) -> bool:
    """Whether a function of a module is the one that the module came with."""
    function = vars(module).get(name)
    if type(function) is BuiltinFunctionType:
        return (function.__module__ or module.__name__) == module.__name__ and function.__name__ == name
    if type(function) is not FunctionType or function.__module__ != module.__name__ or function.__qualname__ != name:
        return False
    return function.__code__.co_filename == module.__file__


class DeferredArray:
    """An array of an image that is not computed yet, on its way to `torch.from_numpy`."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture


# -- what is called instead ----------------------------------------------------------------------------------------


def _open(original: Any) -> Callable[..., Any]:
    def opened(work: Work, *operands: Any, **keywords: Any) -> Any:
        image = original(*operands, **keywords)
        watch(image, work)
        return image

    return opened


def _to_tensor(original: Any) -> Callable[..., Any]:
    def to_tensor(work: Work, pic: Any) -> Any:
        picture, dtype = picture_of(pic), torch.get_default_dtype()
        if picture is None or picture.mode not in CHANNELS or dtype not in FLOATS:
            return original(pic)
        (width, height), num = picture.size, CHANNELS[picture.mode]
        by = Arithmetic("div", number(255, str(dtype).removeprefix("torch.")))
        strides = (height * width, width, 1) if num > 1 else (1, width, 1)
        return deferred_tensor(Elements(picture, (2, 0, 1), (by,)), Layout((num, height, width), strides, dtype))

    return to_tensor


def _from_numpy(original: Any) -> Callable[..., Any]:
    def from_numpy(work: Work, *operands: Any) -> Any:
        if len(operands) != 1 or type(operands[0]) is not DeferredArray:
            return original(*operands)
        picture: Picture = operands[0].picture
        (width, height), num = picture.size, CHANNELS[picture.mode]
        if num == 1:
            return deferred_tensor(
                Elements(picture, (0, 1)), Layout((height, width), (width, 1), torch.uint8, array=True)
            )
        layout = Layout((height, width, num), (width * num, num, 1), torch.uint8, array=True)
        return deferred_tensor(Elements(picture, (0, 1, 2)), layout)

    return from_numpy


def _pil_to_tensor(original: Any) -> Callable[..., Any]:
    def pil_to_tensor(work: Work, pic: Any) -> Any:
        picture = picture_of(pic)
        if picture is None or picture.mode not in CHANNELS:
            return original(pic)
        (width, height), num = picture.size, CHANNELS[picture.mode]
        layout = Layout((num, height, width), (1, num * width, num), torch.uint8, array=True, view=True)
        return deferred_tensor(Elements(picture, (2, 0, 1)), layout)

    return pil_to_tensor


def _normalize(original: Any) -> Callable[..., Any]:
    def normalize(work: Work, tensor: Any, mean: Any, std: Any, inplace: Any = False) -> Any:
        if isinstance(tensor, DeferredTensor) and vars(tensor)["flatout_work"].here():
            given = geometry.constants((mean, std))
            made = tensor.flatout_normalize(*given, in_place=bool(inplace)) if given is not None else None
            if made is not None:
                return made
        return original(tensor, mean, std, inplace)

    return normalize


def _same_size(original: Any) -> Callable[..., Any]:
    def changed(work: Work, img: Any, *operands: Any, **keywords: Any) -> Any:
        picture, given, named = picture_of(img), geometry.constants(operands), geometry.constants(keywords.values())
        if picture is None or picture.mode != "RGB" or given is None or named is None:
            return original(img, *operands, **keywords)
        call = functools.partial(original, **dict(zip(keywords, named, strict=True)))
        return deferred_image(Called(picture, picture.size, picture.mode, call, given, keeps_info=False))

    return changed


def _pad(original: Any) -> Callable[..., Any]:
    def pad(work: Work, img: Any, padding: Any, fill: Any = 0, padding_mode: Any = "constant") -> Any:
        picture, given = picture_of(img), geometry.constants((padding, fill, padding_mode))
        size = None if picture is None else geometry.size_of_pad(picture.size, padding)
        if picture is None or size is None or given is None or padding_mode != "constant":
            return original(img, padding, fill, padding_mode)
        return deferred_image(Called(picture, size, picture.mode, original, given, keeps_info=False))

    return pad


def _to_grayscale(original: Any) -> Callable[..., Any]:
    def to_grayscale(work: Work, img: Any, num_output_channels: Any) -> Any:
        picture, mode = picture_of(img), {1: "L", 3: "RGB"}.get(num_output_channels)
        if picture is None or mode is None or not geometry.converts(picture.mode, "L", picture.info):
            return original(img, num_output_channels)
        return deferred_image(Called(picture, picture.size, mode, original, (num_output_channels,), keeps_info=False))

    return to_grayscale


_PLACES: tuple[tuple[str, str, Replacement], ...] = (
    ("PIL.Image", "open", _open),
    ("torchvision.transforms.functional", "to_tensor", _to_tensor),
    ("torchvision.transforms.functional", "pil_to_tensor", _pil_to_tensor),
    ("torchvision.transforms.functional", "normalize", _normalize),
    ("torchvision.transforms._functional_pil", "pad", _pad),
    ("torchvision.transforms._functional_pil", "to_grayscale", _to_grayscale),
    *(("torchvision.transforms._functional_pil", name, _same_size) for name in SAME_SIZE),
)
