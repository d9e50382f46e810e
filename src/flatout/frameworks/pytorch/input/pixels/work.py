"""Which pixel work does one item need? Pictures and tensors that the script's code has asked for and nobody computed.

In: what the item's code notes while it runs. Out: a job that any thread can do, once the code has ended.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.frameworks.pytorch.input.pixels.decoded import DecodedImages
from flatout.frameworks.pytorch.input.pixels.decoding import Rows
from flatout.frameworks.pytorch.input.pixels.sources import Descriptors
from flatout.guest.interruptions import is_interruption

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.pixels.pictures import Picture
    from flatout.frameworks.pytorch.input.pixels.surroundings import File
    from flatout.frameworks.pytorch.input.pixels.tensors import DeferredTensor

PATIENCE_S = 300.0
"""How long one waits for the pixel work of an item before the batch is left to the script."""


class TooLateError(Exception):
    """Something of an item is not to be had as plain has it; the batch is to be fetched by the script's own path."""


def num_references(things: Sequence[Any]) -> list[int]:
    """The references to each thing; `_ALONE` where only the sequence has it."""
    return [sys.getrefcount(thing) for thing in things]


_ALONE = num_references([object()])[0]


class Held:
    """One item's work, taken as long as one is inside; a class, for it is entered a dozen times for each item."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._work.take()

    def __exit__(self, *_: object) -> None:
        self._work.give_back()


class Work:
    """The pixel work of one item."""

    def __init__(
        self, rows: Rows, descriptors: Descriptors, decoded: DecodedImages, *, files: list[File] | None = None
    ) -> None:
        self.rows = rows
        self.descriptors = descriptors
        self.decoded = decoded
        self.files = files
        """Files that were opened; None where nobody wants to know."""
        self.problem: BaseException | None = None
        """What went wrong, wherever: the batch is to be fetched by the script's own path."""
        self.pictures: list[Picture] = []
        self.tensors: list[DeferredTensor] = []
        self.images: list[weakref.ref[Any]] = []
        """Images that the script has been given and that may be no plain ones yet."""
        self._thread: int | None = threading.get_ident()
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def here(self) -> bool:
        """Whether the item's code is still running, in this thread."""
        return self._thread == threading.get_ident()

    def held(self) -> Held:
        """Inside, nobody else computes anything of this item."""
        return Held(self)

    def take(self) -> None:
        """Wait until nobody else holds it.

        Raises:
            TooLateError: Somebody else does not come to an end.
        """
        if self._pid != os.getpid():  # whoever held it in the process that this was forked from is not here
            self._pid, self._lock = os.getpid(), threading.RLock()
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise TooLateError("the pixel work of an item does not come to an end")

    def give_back(self) -> None:
        """It was taken once less."""
        self._lock.release()

    def spoil(self, problem: BaseException) -> None:
        """Something went wrong; the script may see it or not."""
        if self.problem is None:
            self.problem = problem

    def wanted(self) -> list[DeferredTensor]:
        """The tensors that are not computed and that somebody has."""
        found = zip(self.tensors, num_references(self.tensors), strict=True)
        return [tensor for tensor, num in found if num > _ALONE and hasattr(type(tensor), "flatout_fill")]

    def ended(self) -> list[DeferredTensor]:
        """The item's code is over: the tensors that are still wanted."""
        self._thread = None
        self.tensors = self.wanted()
        return self.tensors

    def do(self) -> None:
        """Compute all of it; what goes wrong is kept in `problem`."""
        try:
            with self.held():
                for tensor in self.tensors:
                    tensor.flatout_fill()
                for picture in self.pictures:
                    picture.settle()
        except BaseException as problem:  # the script's own path raises what belongs to be raised
            self.spoil(problem)
            if not isinstance(problem, Exception) or is_interruption(problem):
                raise
        self.pictures = []

    def drop(self) -> None:
        """Nothing of it is wanted any more."""
        self._thread = None
        self.pictures, self.tensors = [], []

    def hand_out(self) -> None:
        """Make plain images and tensors of all that somebody still has.

        Raises:
            Exception: Whatever computing one of them raises.
        """
        self._thread = None
        images, self.images = self.images, []
        for image in [reference() for reference in images]:
            if image is not None and hasattr(type(image), "flatout_compute"):
                image.flatout_compute()
        for tensor in self.wanted():
            if hasattr(type(tensor), "flatout_compute"):  # or it was computed with another
                tensor.flatout_compute()
        self.tensors = []
