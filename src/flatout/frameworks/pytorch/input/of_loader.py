"""What is known about a loader: where is it kept, so that it is freed with the loader?

On the loader itself. In a dictionary of ours, one with weak keys included, it would be held by us, and the dataset with
it; a dataset that holds its own loader would hold the key, and neither would ever be freed. On the loader they are a
circle that Python's collector sees through. In: a loader, and who wants to know. Out: what that has put there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import DataLoader

NAME = "_flatout"
"""The attribute of a loader."""

Known = TypeVar("Known")


class OfLoader:
    """What those who want to know have put by for one loader. No copy of the loader has it, pickled ones included."""

    __slots__ = ("_loader", "by_owner")

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)
        self.by_owner: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def is_of(self, loader: DataLoader[Any]) -> bool:
        """Whether this is the loader, and not a copy that was given its attributes."""
        return self._loader() is loader

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """As nothing, for who reads it may not have us."""
        return dict, ()


def known(loader: DataLoader[Any], owner: Any, holds: Callable[[Known], bool], find: Callable[[], Known]) -> Known:
    """What `owner` knows about a loader; found, and put by, where nothing is there that still holds."""
    there = loader.__dict__.get(NAME)
    if type(there) is not OfLoader or not there.is_of(loader):
        there = loader.__dict__[NAME] = OfLoader(loader)
    value: Known | None = there.by_owner.get(owner)
    if value is None or not holds(value):
        value = there.by_owner[owner] = find()
    return value


def is_itself_alone(loader: DataLoader[Any]) -> bool:
    """Whether no other loader equals it, as what is known of loaders is found by them."""
    return type(loader).__hash__ is object.__hash__ and type(loader).__eq__ is object.__eq__
