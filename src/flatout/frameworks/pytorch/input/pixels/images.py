"""What does the script hold while an image has not been computed? An image of PIL's that knows its size and mode.

Calls whose result has a known size and mode are noted as pictures. Whatever else is asked of it computes it: it becomes
the very object that PIL would have given, of PIL's own class. In: pictures. Out: images.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from PIL import Image, ImageFilter

from flatout.frameworks.pytorch.input.pixels import geometry
from flatout.frameworks.pytorch.input.pixels.pictures import Called, Cropped, Picture, Same

PICTURE = "_flatout_picture"
"""Where an image keeps its picture, among its attributes."""

get, put = object.__getattribute__, object.__setattr__

_KNOWN = frozenset((
    "size", "width", "height", "mode", "_size", "_mode", "getbands", "palette", "format", "format_description",
    "load", "copy", "convert", "crop", "resize", "transpose", "rotate", "filter", "flatout_compute",
    "close", "filename", "fp", "_fp", "map", "_exclusive_fp", "_close_fp",
))  # fmt: skip
"""Attributes that computing an image does not change."""

_HEAD = frozenset((
    "info", "_copy_info", "getexif", "_exif", "_getexif", "_exif_offset", "_reload_exif", "layers", "layer", "bits",
    "quantization", "app", "applist", "icclist", "get_format_mimetype", "custom_mimetype", "tile", "decoderconfig",
))  # fmt: skip
"""The same for images whose `info` is known beforehand."""

_OPEN_FILE = frozenset(("fp", "_fp", "map"))
"""Attributes that closing a file sets."""


class Deferred:
    """What an image does that is not computed yet; stands before a class of PIL's in a class of ours."""

    flatout_plain: ClassVar[type[Any]]
    """The class of PIL's."""

    def __getattribute__(self, name: str) -> Any:
        if name in _KNOWN:
            return get(self, name)
        if name == "__class__":
            return type(self).flatout_plain
        if name in _HEAD and get(self, "__dict__")[PICTURE].info is not None:
            return get(self, name)
        compute(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_im":  # closed before anybody looked at it
            become(self, {})
        elif name not in _OPEN_FILE and (name != "_exif" or get(self, "__dict__")[PICTURE].info is None):
            compute(self)
        put(self, name, value)

    def __delattr__(self, name: str) -> None:
        compute(self)
        delattr(self, name)

    def __eq__(self, other: object) -> bool:
        compute(self)
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]  # as PIL's images

    def __reduce_ex__(self, protocol: Any) -> Any:
        compute(self)
        return self.__reduce_ex__(protocol)

    def flatout_compute(self) -> None:
        """Become what PIL would have given."""
        compute(self)

    def load(self) -> Any:
        """As PIL's, except that pixels are computed when they are looked at."""
        return computed(self).load() if noted(self) is None else Access(self)

    def copy(self) -> Any:
        """As PIL's."""
        picture = noted(self)
        return computed(self).copy() if picture is None else deferred(Same(picture))

    __copy__ = copy

    def convert(self, mode: Any = None, *operands: Any, **keywords: Any) -> Any:
        """As PIL's."""
        picture = noted(self)
        if picture is None or operands or keywords or not geometry.converts(picture.mode, mode, picture.info):
            return computed(self).convert(mode, *operands, **keywords)
        if mode == picture.mode:
            return deferred(Same(picture))
        return deferred(Called(picture, picture.size, mode, Image.Image.convert, (mode,)))

    def crop(self, box: Any = None) -> Any:
        """As PIL's."""
        picture, size = noted(self), geometry.size_of_crop(box)
        if picture is None or size is None:
            return computed(self).crop(box)
        return deferred(Cropped(picture, size, tuple(box), geometry.rows_of_crop(box, picture.size)))

    def resize(self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Any:
        """As PIL's."""
        picture, wanted = noted(self), geometry.size_of_resize(size)
        given = geometry.constants((resample, box, reducing_gap))
        if picture is None or wanted is None or given is None:
            return computed(self).resize(size, resample, box, reducing_gap)
        return deferred(Called(picture, wanted, picture.mode, Image.Image.resize, (wanted, *given)))

    def transpose(self, method: Any) -> Any:
        """As PIL's."""
        picture = noted(self)
        size = None if picture is None else geometry.size_of_transpose(picture.size, method)
        if picture is None or size is None:
            return computed(self).transpose(method)
        return deferred(Called(picture, size, picture.mode, Image.Image.transpose, (method,)))

    def rotate(self, angle: Any, resample: Any = 0, expand: Any = 0, *operands: Any, **keywords: Any) -> Any:
        """As PIL's."""
        picture, given = noted(self), geometry.constants((angle, resample, expand, *operands))
        named = geometry.constants(keywords.values())
        if picture is None or given is None or named is None or expand:
            return computed(self).rotate(angle, resample, expand, *operands, **keywords)
        call = partial(Image.Image.rotate, **dict(zip(keywords, named, strict=True)))
        return deferred(Called(picture, picture.size, picture.mode, call, given))

    def filter(self, filter: Any) -> Any:
        """As PIL's."""
        picture, kind = noted(self), filter if isinstance(filter, type) else type(filter)
        if picture is None or getattr(ImageFilter, kind.__name__, None) is not kind:
            return computed(self).filter(filter)
        return deferred(Called(picture, picture.size, picture.mode, Image.Image.filter, (filter,)))


class DeferredImage(Deferred, Image.Image):
    """An image in memory that is not computed yet."""

    flatout_plain = Image.Image


class Access:
    """What `load` gives: single pixels, for which the image is computed when they are looked at."""

    def __init__(self, image: Any) -> None:
        self._image = image

    def __getattr__(self, name: str) -> Any:
        if name == "_image":  # while being copied
            raise AttributeError(name)
        return getattr(computed(self._image).load(), name)

    def __getitem__(self, place: Any) -> Any:
        return computed(self._image).load()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        computed(self._image).load()[place] = value


def deferred(picture: Picture) -> DeferredImage:
    """The image that the script is given for a picture."""
    image = DeferredImage.__new__(DeferredImage)
    own = get(image, "__dict__")
    own.update(vars(Image.Image()), _size=picture.size, _mode=picture.mode)
    del own["_im"]
    own["info"] = picture.info
    own[PICTURE] = picture
    picture.given_as(image)
    return image


def noted(image: Any) -> Picture | None:
    """The picture of an image that is not computed yet, while more can be noted about it; else None."""
    if not issubclass(type(image), Deferred):
        return None
    picture: Picture = get(image, "__dict__")[PICTURE]
    return picture if picture.work.here() and picture.mode in geometry.CONVERTED else None


def computed(image: Any) -> Any:
    """The image as PIL would have given it; the same object."""
    if issubclass(type(image), Deferred):
        compute(image)
    return image


def compute(image: Any) -> None:
    """Make PIL's own of an image that is not computed yet.

    Raises:
        Exception: Whatever PIL raises.
    """
    picture: Picture = get(image, "__dict__")[PICTURE]
    try:
        become(image, picture.own_attributes())
    except BaseException as problem:
        picture.work.spoil(problem)
        raise


def become(image: Any, attributes: dict[str, Any]) -> None:
    """An image of ours becomes one of PIL's; what is known of it already stays."""
    own = get(image, "__dict__")
    picture: Picture = own.pop(PICTURE)
    if picture.info is None:
        own.update(attributes)
    elif "_im" in attributes:
        own["_im"] = attributes["_im"]
    put(image, "__class__", type(image).flatout_plain)
