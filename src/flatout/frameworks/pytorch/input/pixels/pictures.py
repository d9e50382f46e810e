"""Which calls make an image that nobody has computed yet? Noted when the script makes them, made when it is wanted.

A picture's image is never changed: who wants to change it is given a copy. In: an opened file, and calls of PIL's on
images. Out: the images that the same calls give.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from PIL import Image, ImageFile

from flatout.frameworks.pytorch.input.pixels.decoded import Identity
from flatout.frameworks.pytorch.input.pixels.decoding import Opened
from flatout.frameworks.pytorch.input.pixels.sources import Source
from flatout.frameworks.pytorch.input.pixels.work import Work

_OF_THE_FILE = ("filename", "fp", "_fp", "_exclusive_fp", "map")


class Picture:
    """An image that is computed when it is wanted.

    Attributes:
        work: The pixel work that it belongs to.
        size: Its width and height.
        mode: Its mode.
        info: What PIL will keep beside its pixels; None where only computing it shows.
    """

    def __init__(self, work: Work, size: tuple[int, int], mode: str, info: dict[Any, Any] | None) -> None:
        self.work = work
        self.size = size
        self.mode = mode
        self.info = info
        self._image: Any = None
        self._num_uses = 0
        """Calls that take it."""
        self._given: weakref.ref[Any] | None = None
        work.pictures.append(self)

    def given_as(self, image: Any) -> None:
        """The script has it as this image."""
        self._given = weakref.ref(image)
        self.work.images.append(self._given)

    def used(self) -> Picture:
        """Another call takes it."""
        self._num_uses += 1
        return self

    def image(self) -> Any:
        """The image, which must not be changed.

        Raises:
            Exception: Whatever PIL raises.
        """
        with self.work.held():
            if self._image is None:
                self._image = self._made()
                if self.info is not None:  # what PIL's own functions copy to the images that they make
                    self._image.info = self.info
            return self._image

    def own_attributes(self) -> dict[str, Any]:
        """The attributes of the image, for somebody who may change it.

        Raises:
            Exception: Whatever PIL raises.
        """
        image = self.image()
        return dict(vars(image.copy() if self._num_uses else image))

    def upper(self, num_rows: int) -> Any:
        """An image whose upper rows are those of this one, which must not be changed."""
        return self.image()

    def settle(self) -> None:
        """See to it that whatever computing it raises has been raised."""
        self.image()

    def _made(self) -> Any:
        raise NotImplementedError

    def _only_one_call(self) -> bool:
        """Whether one call takes it and nobody else ever can."""
        return self._num_uses == 1 and (self._given is None or self._given() is None)


class Decoded(Picture):
    """What is in a file."""

    def __init__(self, work: Work, opened: Opened, source: Source, info: dict[Any, Any] | None) -> None:
        super().__init__(work, opened.size, opened.mode, info)
        self._opened = opened
        self._source = source
        self._settled = False
        self._is_kept = False
        """Whether others may be given the image as well."""

    def upper(self, num_rows: int) -> Any:
        """See `Picture.upper`; of some files the rest is never decoded."""
        with self.work.held():
            if self._image is None and self._only_one_call() and not self.work.decoded.wants(self._identity()):
                rows = self.work.rows.upper(self._opened, self._source.content(), num_rows)
                if rows is not None:
                    self._settled = True
                    return rows
            return self.image()

    def settle(self) -> None:
        """See `Picture.settle`."""
        if not self._settled:
            self.image()

    def own_attributes(self) -> dict[str, Any]:
        """See `Picture.own_attributes`; what belongs to the file itself is left out."""
        image = self.image()
        own = {name: value for name, value in vars(image).items() if name not in _OF_THE_FILE}
        if not self._num_uses and not self._is_kept:
            return own
        own = {name: copy.copy(value) if type(value) in (dict, list) else value for name, value in own.items()}
        return {**own, "info": _copied(image.info), "_im": image.im.copy()}

    def _made(self) -> Any:
        decoded = self.work.decoded
        image = decoded.get(self._identity())
        self._is_kept = image is not None
        if image is None:
            image = self._opened.whole(self._source.content())
            identity = self._identity()
            self._is_kept = identity is not None and decoded.wants(identity) and decoded.put(identity, image)
        else:
            self._source.close()
        return _twin(image) if self._is_kept else image

    def _identity(self) -> Identity | None:
        """What the image is known by among those that are kept."""
        opened, identity = self._opened, self._source.identity
        if identity is None:
            return None
        return *identity, opened.kind, opened.size, opened.mode, ImageFile.LOAD_TRUNCATED_IMAGES


class Called(Picture):
    """What a call gives that takes an image."""

    def __init__(
        self,
        of: Picture,
        size: tuple[int, int],
        mode: str,
        call: Callable[..., Any],
        operands: tuple[Any, ...] = (),
        *,
        keeps_info: bool = True,
    ) -> None:
        super().__init__(of.work, size, mode, _copied(of.info) if keeps_info else None)
        self._of = of.used()
        self._call = call
        self._operands = operands

    def _made(self) -> Any:
        made = self._call(self._taken(), *self._operands)
        if made.size != self.size or made.mode != self.mode:
            raise RuntimeError("a call on an image gave another size or mode than was expected")
        return made

    def _taken(self) -> Any:
        return self._of.image()


class Cropped(Called):
    """A part of an image."""

    def __init__(self, of: Picture, size: tuple[int, int], box: Any, num_rows: int) -> None:
        super().__init__(of, size, of.mode, Image.Image.crop, (box,))
        self._num_rows = num_rows

    def _taken(self) -> Any:
        return self._of.upper(self._num_rows)


class Same(Picture):
    """A copy of an image, which needs none while nobody changes either."""

    def __init__(self, of: Picture) -> None:
        super().__init__(of.work, of.size, of.mode, _copied(of.info))
        self._of = of.used()

    def image(self) -> Any:
        """See `Picture.image`."""
        return self._of.image()

    def own_attributes(self) -> dict[str, Any]:
        """See `Picture.own_attributes`."""
        return dict(vars(self.image().copy()))

    def upper(self, num_rows: int) -> Any:
        """See `Picture.upper`."""
        with self.work.held():
            return self._of.upper(num_rows) if self._only_one_call() else self.image()

    def settle(self) -> None:
        """See `Picture.settle`."""
        self._of.settle()


def _twin(image: Any) -> Any:
    """An image with the same pixels in the same memory; what stands beside them is its own."""
    twin = object.__new__(type(image))
    vars(twin).update(vars(image), info=_copied(image.info))
    return twin


def _copied(info: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """As PIL copies it for a new image."""
    if info is None:
        return None
    return {name: value.copy() if isinstance(value, list) else value for name, value in info.items()}
