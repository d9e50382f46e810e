"""What does the script hold between opening an image file and its pixels? PIL's own object, which is decoded later.

It is what PIL's `open` gave, under a class of ours; where its pixels are wanted it goes over into an image that is not
computed yet, or into PIL's own. In: what `open` gave. Out: the same object.
"""

from __future__ import annotations

import sys
import types
import weakref
from functools import lru_cache
from typing import Any, ClassVar

from flatout.frameworks.pytorch.input.pixels import geometry
from flatout.frameworks.pytorch.input.pixels.decoding import Opened, opened_jpeg
from flatout.frameworks.pytorch.input.pixels.images import PICTURE, Deferred, get, noted, put
from flatout.frameworks.pytorch.input.pixels.pictures import Decoded, Picture
from flatout.frameworks.pytorch.input.pixels.sources import source_of
from flatout.frameworks.pytorch.input.pixels.work import Work

FORMATS = {
    "PIL.JpegImagePlugin": "JpegImageFile", "PIL.PngImagePlugin": "PngImageFile", "PIL.WebPImagePlugin": "WebPImageFile"
}  # fmt: skip
"""Classes of files that are decoded later, by module. Nothing of a JPEG comes behind its pixels."""

_WORK = "_flatout_work"
_CALLS = frozenset(("load", "copy", "convert", "crop", "resize", "transpose", "rotate", "filter"))
"""What loads a file."""


class Unloaded:
    """What an image file does that is not loaded; stands before a class of PIL's in a class of ours."""

    flatout_plain: ClassVar[type[Any]]
    """The class of PIL's."""

    def __getattribute__(self, name: str) -> Any:
        if name in _CALLS:
            return getattr(defer(self), name)
        if name == "__class__":
            return type(self).flatout_plain
        return get(self, name)

    def __copy__(self) -> Any:
        return defer(self).copy()

    def __eq__(self, other: object) -> bool:
        _leave(self)
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]  # as PIL's images

    def __reduce_ex__(self, protocol: Any) -> Any:
        _leave(self)
        return self.__reduce_ex__(protocol)

    def flatout_compute(self) -> None:
        """Become what PIL would have given: a file that PIL decodes when it is wanted."""
        _leave(self)


def watch(image: Any, work: Work) -> None:
    """Have what PIL's `open` gave decoded later, where that is known how."""
    kind = type(image)
    if getattr(sys.modules.get(kind.__module__), FORMATS.get(kind.__module__, ""), None) is not kind:
        return
    if image.mode not in geometry.CONVERTED or "transparency" in image.info or getattr(image, "is_animated", False):
        return
    get(image, "__dict__")[_WORK] = work
    put(image, "__class__", _classes(kind)[0])
    work.images.append(weakref.ref(image))


def defer(image: Any) -> Any:
    """A file is to be loaded: note it, or have PIL load it where that cannot wait; the same object."""
    own, kind = get(image, "__dict__"), type(image).flatout_plain
    work: Work = own[_WORK]
    whole = len(own["tile"]) == (0 if kind.__name__ == "WebPImageFile" else 1)
    suited = work.here() and own["_im"] is None and whole and not own["decoderconfig"]
    source = source_of(own["fp"], work.descriptors) if suited else None
    if source is None:
        _leave(image)
        return image
    if kind.__name__ == "JpegImageFile":
        picture = Decoded(work, opened_jpeg(kind, own, source.head(own["fp"].tell())), source, own["info"])
    else:
        picture = Decoded(work, Opened(kind, own["filename"], own["_size"], own["_mode"]), source, None)
    if own["_exclusive_fp"] and kind._close_exclusive_fp_after_loading:  # what loading does to a file
        own["fp"].close()
    own.update({"tile": [], "fp": None, "map": None, "_readonly": 0, PICTURE: picture})
    del own[_WORK]
    put(image, "__class__", _classes(kind)[1])
    picture.given_as(image)
    return image


def picture_of(image: Any) -> Picture | None:
    """The picture of an image, where more can be noted about it; a file that is not loaded is to be."""
    if issubclass(type(image), Unloaded):
        defer(image)
    return noted(image)


@lru_cache(maxsize=16)
def _classes(kind: type[Any]) -> tuple[type[Any], type[Any]]:
    """The classes of ours for a class of PIL's: not loaded, and not computed."""
    return _class_of(Unloaded, kind), _class_of(Deferred, kind)


def _class_of(first: type[Any], kind: type[Any]) -> type[Any]:
    made = types.new_class(kind.__name__, (first, kind), exec_body=lambda names: names.update(flatout_plain=kind))
    made.__module__ = kind.__module__
    return made


def _leave(image: Any) -> None:
    """The file is PIL's own again."""
    get(image, "__dict__").pop(_WORK)
    put(image, "__class__", type(image).flatout_plain)
