"""What does a worker's copy of a dataset hold, when the script changes the dataset while a pass is under way?

A forked worker has everything as it was when the pass began. Here datasets, transforms and the script's own objects are
copied, with their attributes and the lists and dictionaries in them; data are not: arrays, tensors, the elements of
long lists, and objects of other libraries are shared. None of the script's code runs for it. In: a dataset. Out: its
twin.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from flatout.frameworks.pytorch.seams.script_code import is_the_scripts

MOST_ELEMENTS = 1000
"""Elements of a list or a dictionary that are looked into; a longer one is copied, and its elements are shared."""

_CHANGES_COPIES = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


def copied(dataset: Any) -> Any:
    """A dataset that shares its data with another, but no attribute, list or dictionary that may be written to."""
    if hasattr(type(dataset), "__copy__"):
        raise TypeError("the dataset copies itself in its own way")
    return _twin_of(dataset, {}) if _is_looked_into(type(dataset)) else copy.copy(dataset)


def _twin_of(thing: Any, made: dict[int, Any]) -> Any:
    """The same thing where it is data; `made`: twins by the identity of what they are twins of."""
    if id(thing) in made:
        return made[id(thing)]
    kind = type(thing)
    if kind is tuple:
        parts = [_twin_of(part, made) for part in thing] if len(thing) <= MOST_ELEMENTS else thing
        return thing if all(one is other for one, other in zip(parts, thing, strict=True)) else tuple(parts)
    if kind is list:
        twin: Any = made.setdefault(id(thing), [])
        twin.extend([_twin_of(part, made) for part in thing] if len(thing) <= MOST_ELEMENTS else thing)
    elif kind in (dict, OrderedDict):
        twin = made.setdefault(id(thing), kind())
        inside = len(thing) <= MOST_ELEMENTS
        twin.update({name: _twin_of(part, made) for name, part in thing.items()} if inside else thing)
    elif kind in (set, bytearray):
        twin = made[id(thing)] = kind(thing)
    elif _is_looked_into(kind):
        twin = made[id(thing)] = object.__new__(kind)
        twin.__dict__.update({name: _twin_of(part, made) for name, part in vars(thing).items()})
    else:
        return thing
    return twin


def _is_looked_into(kind: type) -> bool:
    """Whether objects of a class are attributes and nothing else, and of a kind that items are made by."""
    if not hasattr(kind, "__dict__") or kind.__new__ not in (object.__new__, getattr(Dataset, "__new__", None)):
        return False
    if not (issubclass(kind, Dataset) or kind.__module__.startswith("torchvision.transforms") or is_the_scripts(kind)):
        return False
    usual = nn.Module if issubclass(kind, nn.Module) else object
    if any(getattr(kind, name, None) is not getattr(usual, name, None) for name in _CHANGES_COPIES):
        return False
    return not any(vars(base).get("__slots__") for base in kind.__mro__ if base.__module__ != "typing")
