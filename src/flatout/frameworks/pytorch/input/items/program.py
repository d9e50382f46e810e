"""What does a dataset compute for an index? Operations one after another, each with what it is given.

A program is read once (`reading`) and computed for many indices at once. In: the dataset and indices. Out: the leaves
of the item, each as `Rows`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flatout.frameworks.pytorch.input.items.draws import drawn
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised
from flatout.guest.interruptions import let_through


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value lies."""

    number: int


DATASET, INDEX, DRAWN = Slot(0), Slot(1), Slot(2)
"""Where a program finds what it is given: the last are the random numbers."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation: operands are `Slot`s, constants, lists and tuples; `Rows` where they differ from item to item."""

    target: int
    compute: Callable[..., Any]
    operands: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """How an index becomes an item.

    Attributes:
        instructions: In order.
        constants: What lies in each slot before anything is computed.
        item: The item: a tree of tuples, lists and dictionaries, whose leaves are `Slot`s.
        guards: Must all hold for the program to be that of the dataset: the code and the names that it was read from.
        takes: Operands: what items are taken out of, which all of them share.
        parameters: Whatever else they depend on, beside their index.
        varying: Where values lie that differ from item to item.
        works: Whether anything is computed, and not only moved.
        draws: The random numbers that an item draws, in order, as `draws.drawn` names them.
        functions: Those that compute an item.
    """

    instructions: tuple[Instruction, ...]
    constants: tuple[Any, ...]
    item: Any
    guards: tuple[Callable[[], bool], ...]
    takes: tuple[Any, ...] = ()
    parameters: tuple[Any, ...] = ()
    varying: frozenset[Slot] = frozenset()
    works: bool = False
    draws: tuple[int, ...] = ()
    functions: tuple[types.FunctionType, ...] = ()
    run: Callable[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", straight_line(self.instructions, self.constants, self.item))

    def holds(self) -> bool:
        """Whether the code that was read is still the code that would run."""
        try:
            return all([guard() for guard in self.guards])  # a generator takes twice as long
        except Exception as problem:  # noqa: BLE001  what can no longer be looked at does not hold
            let_through(problem)
            return False

    def compute(self, dataset: Any, indices: Sequence[int]) -> Any:
        """The item with a row for each index in place of each value."""
        numbers = drawn(self.draws, len(indices)) if self.draws else None
        return self.run(dataset, Rows("int", list(indices)), numbers)


def straight_line(instructions: Sequence[Instruction], constants: Sequence[Any], item: Any) -> Callable[..., Any]:
    """The program as a function of the dataset and the index: what walks through instructions takes as long as they do.

    >>> import operator; twice = Instruction(3, operator.mul, (INDEX, 2), {})
    >>> straight_line([twice], [None] * 4, (Slot(3), "text"))(None, 21)
    (42, 'text')
    """
    names: dict[str, Any] = {f"v{number}": value for number, value in enumerate(constants)}

    def named(part: Any) -> str:
        kind = type(part)
        if kind is Slot:
            return f"v{part.number}"
        if kind is tuple or kind is list:
            inside = "".join(named(one) + ", " for one in part)
            return f"({inside})" if kind is tuple else f"[{inside}]"
        if kind is dict:
            return "{" + "".join(f"{named(key)}: {named(one)}, " for key, one in part.items()) + "}"
        names[f"c{len(names)}"] = part
        return f"c{len(names) - 1}"

    lines = [f"def program(v{DATASET.number}, v{INDEX.number}, v{DRAWN.number}=None):"]
    for one in instructions:
        given = [*map(named, one.operands), *(f"{name}={named(part)}" for name, part in one.keywords.items())]
        lines.append(f"    v{one.target} = {named(one.compute)}({', '.join(given)})")
    exec("\n".join([*lines, f"    return {named(item)}"]), names)
    program: Callable[..., Any] = names["program"]
    return program


def slots_of(tree: Any) -> set[Slot]:
    """The places that operands name."""
    return {leaf for leaf in tree_leaves(tree) if type(leaf) is Slot}


def require(value: Any, look: Callable[[Any], Any], expected: Any) -> None:
    """What a look at a value shows is what it showed when the dataset was read."""
    if look(value) != expected:
        raise Unvectorised("something is of another kind than when the dataset was read")


def require_truth(value: Any, expected: bool) -> None:
    """A branch that was taken one way is taken that way again, for every item."""
    if type(value) is Rows:
        if value.kind != "truth" or any(bool(one) is not expected for one in value.data):
            raise Unvectorised("a branch that not all items take")
    elif bool(value) is not expected:
        raise Unvectorised("a condition has changed since the dataset was read")


def form_of(rows: Any) -> Any:
    """The kind, and the width, of what is taken for each item."""
    if type(rows) is not Rows:
        return None
    return rows.kind, None if rows.kind == "int" else getattr(rows.data, "dtype", None)


def layout_of(container: Any) -> Any:
    """How a container's items lie in memory, as far as what is done with them may depend on it."""
    strides = container.stride() if type(container) is torch.Tensor else getattr(container, "strides", None)
    return type(container), tuple(getattr(container, "shape", ())[1:]), tuple(strides or ())
